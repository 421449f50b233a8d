"""A kept command ends with its starter, whatever happens to the starter."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from cli.keep import keep
from tests.cli.processes import list_running, wait_until

STARTER = """
import sys, time
from pathlib import Path
from cli.keep import keep
kept = keep(("sleep", "301"), log=Path(sys.argv[1]))
print("kept", flush=True)
time.sleep(300)
"""


def test_what_a_command_prints_is_in_its_log_and_its_status_is_known(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log.txt"
    kept = keep(("sh", "-c", "echo to stdout; echo to stderr >&2; exit 7"), log=log)
    assert kept.wait(10) == 7
    assert sorted(log.read_text().splitlines()) == ["to stderr", "to stdout"]


def test_a_command_that_is_not_there_says_so_in_its_log(tmp_path: Path) -> None:
    kept = keep(("no-such-program",), log=tmp_path / "log.txt")
    assert kept.wait(10) == 127
    assert "no-such-program does not start" in (tmp_path / "log.txt").read_text()


def test_ending_sends_the_chosen_signal(tmp_path: Path) -> None:
    command = ("sh", "-c", "trap 'echo interrupted; exit 3' INT; echo ready; while :; do sleep 0.05; done")
    kept = keep(command, log=tmp_path / "log.txt", stop_signal=signal.SIGINT)
    wait_until(lambda: "ready" in (tmp_path / "log.txt").read_text())
    assert kept.end() == 3
    assert "interrupted" in (tmp_path / "log.txt").read_text()


def test_the_signal_arrives_also_where_the_starter_ignores_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        test_ending_sends_the_chosen_signal(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_does_not_end_is_killed_with_its_children_after_the_time_of_grace(tmp_path: Path) -> None:
    kept = keep(("sh", "-c", "trap '' TERM; sleep 302; echo after"), log=tmp_path / "log.txt", grace_s=0.3)
    wait_until(lambda: list_running("sleep", "302"))
    started = time.monotonic()
    assert kept.end() == 128 + signal.SIGKILL
    assert 0.3 <= time.monotonic() - started < 5
    wait_until(lambda: not list_running("sleep", "302"))


def test_a_command_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen((sys.executable, "-c", STARTER, str(tmp_path / "log.txt")), stdout=subprocess.PIPE)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"kept\n"
    wait_until(lambda: list_running("sleep", "301"))
    starter.kill()
    starter.wait()
    wait_until(lambda: not list_running("sleep", "301"))
