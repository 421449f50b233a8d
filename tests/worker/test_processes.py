"""Locks that die with their holder, and processes that are found wherever they went."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from worker.processes import MARK, describe_exit, end_processes, find_processes, hold_lock, is_locked, start_detached

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def start_marked(
    mark: str, script: str = "import time; print('up', flush=True); time.sleep(60)"
) -> subprocess.Popen[str]:
    environment = {**os.environ, MARK: mark}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    script = (
        "import sys, time; from pathlib import Path; from worker.processes import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('up', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_locked(lock)
    holder.kill()
    holder.wait()
    assert not is_locked(lock)
    with hold_lock(lock):
        assert is_locked(lock)


def test_processes_are_found_by_job_and_number_and_by_nothing_else() -> None:
    first, second, other = start_marked("job-a/1"), start_marked("job-a/12"), start_marked("job-ab/1")
    try:
        assert [process.pid for process in find_processes("job-a", 1)] == [first.pid]
        assert [process.pid for process in find_processes("job-a", 12)] == [second.pid]
        assert {process.pid for process in find_processes("job-a")} == {first.pid, second.pid}
    finally:
        for process in (first, second, other):
            process.kill()
            process.wait()


def test_the_deaf_are_killed_when_their_time_is_over() -> None:
    process = start_marked("job-deaf/1", DEAF)
    began = time.monotonic()
    end_processes("job-deaf", 1, grace_s=1)
    assert 1 <= time.monotonic() - began < 10
    assert find_processes("job-deaf", 1) == []
    assert not psutil.pid_exists(process.pid)


def test_what_is_started_detached_belongs_to_nobody(tmp_path: Path) -> None:
    start_detached("platform", [], tmp_path / "log")
    for _ in range(100):
        if (tmp_path / "log").read_text():
            break
        time.sleep(0.05)
    assert "Linux" in (tmp_path / "log").read_text()
    assert not any("platform" in child.cmdline() for child in psutil.Process().children())


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(-9) == "the trainer was ended by SIGKILL"
    assert describe_exit(2) == "the trainer ended with exit code 2 and without a word"
    assert describe_exit(None) == "the trainer ended without a word"
