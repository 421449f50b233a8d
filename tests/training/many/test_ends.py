"""Real processes: a run on two ranks from the command line to its end, whichever of them is stopped, killed or hangs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.training.many.ranks import ENVIRONMENT, assert_same_training, on_ranks
from tests.training.tiny_runs import events_of, last_event, make_job, train_here
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

LONG = {"n_epochs": 400, "eval_steps": 10_000, "save_steps": 10}


def start(folder: Path, body: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    spec = folder / "spec.json"
    spec.write_text(json.dumps(body))
    command = [sys.executable, "-m", "training", "run", str(spec), "--run-dir", str(folder / "run")]
    environment = {**ENVIRONMENT, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    while not process.stdout.readline().startswith(f"step {step}/"):
        assert process.poll() is None, process.communicate()


def pids_of(path: Path) -> list[int]:
    pids: list[int] = events_of(path, "started")[-1].data["pids"]
    return pids


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False


def test_a_run_from_the_command_line_is_that_of_one_process_and_goes_on_after_a_signal(tmp_path: Path) -> None:
    body = make_job(tmp_path, rows=9, hyper={"n_epochs": 40, "eval_steps": 60, "save_steps": 60})
    assert train_here(tmp_path / "one", body) == EXIT_FINISHED
    process = start(tmp_path, on_ranks(body, 2, "ddp"))
    wait_for_step(process, 10)
    process.send_signal(signal.SIGTERM)
    rest, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (EXIT_STOPPED, "")
    assert "asked by SIGTERM; the same command goes on from there" in rest
    stopped = last_event(tmp_path / "run")
    assert stopped.type == "stopped"
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped.step:08d}").is_dir()
    again = start(tmp_path, on_ranks(body, 2, "ddp"))
    assert again.communicate(timeout=100)[1] == ""
    assert again.returncode == EXIT_FINISHED
    assert_same_training(tmp_path / "run", tmp_path / "one")
    assert not any(lives(pid) for pid in pids_of(tmp_path / "run"))


def test_a_rank_that_is_killed_ends_all_within_seconds_and_is_named(tmp_path: Path) -> None:
    """The same command goes on from the last checkpoint; the service finds the ranks by their mark, and ends them."""
    body = on_ranks(make_job(tmp_path, rows=9, hyper=LONG), 2, "fsdp")
    process = start(tmp_path, body)
    wait_for_step(process, 25)
    killed = time.monotonic()
    os.kill(pids_of(tmp_path / "run")[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert process.returncode == EXIT_FAILED
    assert said == "error: rank 1 was killed (SIGKILL); the system does this when memory runs out\n"
    failed = last_event(tmp_path / "run")
    assert (failed.type, failed.data["code"], failed.data["rank"]) == ("failed", "rank_died", 1)
    assert (failed.data["fault"], failed.data["retryable"]) == ("infrastructure", True)
    assert failed.step >= 25
    assert not any(lives(pid) for pid in pids_of(tmp_path / "run"))
