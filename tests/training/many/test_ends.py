"""Real processes: a run on two ranks from the command line to its end, where one is stopped, killed or hangs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.many.ranks import ENVIRONMENT, assert_same_training, on_ranks
from tests.training.tiny_runs import events_of, last_event, make_job, train_here
from training.launch import make_command, make_environment
from training.rank.lock import lock
from training.rundir import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    TIMEOUT_SETTING,
    RunDir,
    write_json,
)
from worker.processes import MARK, end_processes, find_processes, make_mark

LONG = {"n_epochs": "auto", "max_steps": 100_000, "eval_steps": 10_000, "save_steps": 10}
"""No machine is so fast that it comes to its end before it is stopped."""


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
    body = make_job(tmp_path, rows=9, hyper={**LONG, "max_steps": 120, "learning_rate": 1e-4})
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


def test_a_rank_that_hangs_is_found_out_and_all_write_where_they_stand(tmp_path: Path) -> None:
    body = on_ranks(make_job(tmp_path, rows=9, hyper=LONG), 2, "ddp")
    process = start(tmp_path, body, **{TIMEOUT_SETTING: "5"})
    wait_for_step(process, 5)
    os.kill(pids_of(tmp_path / "run")[1], signal.SIGSTOP)
    _, said = process.communicate(timeout=100)
    assert process.returncode == EXIT_FAILED
    assert said == "error: rank 1 did not answer the others in time; log.txt says where each rank stood\n"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "most recent call first" in log
    assert "loop.py" in log
    assert not any(lives(pid) for pid in pids_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("strategy", "more", "param", "words"),
    [
        ("ddp", {"adapter": {"target_modules": ["q_prj"]}}, "adapter.target_modules", "q_prj"),
        (
            "zero2",
            {"deepspeed": {"zero_optimization": {"allgather_bucket_size": 7}}},
            "deepspeed",
            "DeepSpeed does not take it (allgather_bucket_size must be a multiple of",
        ),
    ],
)
def test_a_job_that_all_ranks_refuse_is_refused_as_on_one_device(
    strategy: str, more: dict[str, Any], param: str, words: str, tmp_path: Path
) -> None:
    process = start(tmp_path, on_ranks({**make_job(tmp_path), **more}, 2, strategy))
    _, said = process.communicate(timeout=100)
    assert process.returncode == EXIT_FAILED
    assert said.startswith(f"error: {param}: ")
    assert words in said
    assert said.count("\n") == 1
    failed = last_event(tmp_path / "run")
    assert (failed.type, failed.data["code"], failed.data["param"]) == ("failed", "invalid_value", param)
    assert "Traceback" not in (tmp_path / "run" / "log.txt").read_text()


def test_more_devices_than_there_are_are_refused_before_a_process_is_started_for_each(tmp_path: Path) -> None:
    body = {**make_job(tmp_path), "resources": {"gpus": 4}}
    process = start(tmp_path, body)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (EXIT_FAILED, "error: resources.gpus: 4 asked, this host has 0\n")
    (failed,) = events_of(tmp_path / "run")
    assert (failed.type, failed.data["code"]) == ("failed", "no_such_device")


def test_a_directory_at_which_another_run_is_at_work_is_left_alone(tmp_path: Path) -> None:
    body = on_ranks(make_job(tmp_path, rows=9), 2, "ddp")
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    with lock(run_dir.path / "lock"):
        process = start(tmp_path, body)
        _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_FAILED
    assert "another process is at work in" in said
    assert not run_dir.events.exists()


def test_a_service_finds_all_processes_of_a_run_by_their_mark_and_ends_them(tmp_path: Path) -> None:
    body = on_ranks(make_job(tmp_path, rows=9, hyper=LONG), 2, "ddp")
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    write_json(run_dir.spec, body)
    command, environment = make_command(run_dir.path, 1), {**make_environment(ENVIRONMENT), MARK: make_mark("job", 1)}
    with run_dir.log.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    while not (run_dir.events.exists() and any(event.step > 5 for event in events_of(run_dir.path, "metrics"))):
        assert process.poll() is None, run_dir.log.read_text()
        time.sleep(0.1)
    found = {process.pid for process in find_processes("job", 1)}
    assert {process.pid, *pids_of(run_dir.path)} <= found
    end_processes("job", 1, grace_s=60)
    process.wait(10)  # its exit code was collected by `end_processes`, as that of any child
    assert last_event(run_dir.path).type == "stopped"
    assert not find_processes("job", 1)
    assert len(run_dir.list_checkpoints()) > 0
