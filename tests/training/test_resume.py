"""A run that was interrupted, wherever and however, ends as the one that was not: bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    StopAtCheck,
    curve_of,
    events_of,
    last_event,
    make_job,
    read_json,
    same_weights,
    train_here,
    without_times,
)

from tests.tiny import make_rows, save_model, write_rows
from training.launch import make_command, make_environment
from training.rank.random_state import RandomState
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RunDir, step_of, write_json

KINDS = {
    "lora with dropout": {"adapter": {"dropout": 0.3}},
    "full": {"adapter": {"type": "full"}},
    "full, several rows a pass": {"adapter": {"type": "full"}, "hyper": {"micro_batch_size": 2}},
    "checkpointed": {"adapter": {"dropout": 0.3}, "gradient_checkpointing": True},
    "dpo": {"method": "dpo", "adapter": {"dropout": 0.3}},
    "dpo, several pairs a pass": {"method": "dpo", "hyper": {"micro_batch_size": 2}},
    "kto": {"method": "kto", "adapter": {"dropout": 0.3}},
    "pretrain": {"method": "pretrain", "hyper": {"max_seq_len": 16, "n_epochs": "auto", "max_steps": 6}},
}


class Whole:
    """A run that was never interrupted, and its body."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.body = make_job(folder, **job)
        self.path = folder / "whole"
        self.result = "model" if job.get("adapter", {}).get("type") == "full" else "adapter"
        assert train_here(self.path, self.body) == EXIT_FINISHED

    def assert_equal(self, path: Path) -> None:
        assert curve_of(path) == curve_of(self.path)
        assert same_weights(path / self.result, self.path / self.result)
        assert without_times(last_event(path).data) == without_times(last_event(self.path).data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"), **KINDS["lora with dropout"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(kind: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, **KINDS[kind])
    path = tmp_path / "run"
    assert train_here(path, whole.body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    stopped = last_event(path)
    assert stopped.type == "stopped"
    assert stopped.data == {"reason": "asked by the test"}
    assert 0 < stopped.step < 6
    assert train_here(path, whole.body, attempt=2) == EXIT_FINISHED
    again = [event for event in events_of(path) if event.attempt == 2]
    assert again[0].data["resumed_from"] == stopped.step
    assert [event.step for event in again if event.type == "metrics"] == list(range(stopped.step + 1, 7))
    whole.assert_equal(path)


def test_a_run_may_be_stopped_at_any_moment(whole: Whole, tmp_path: Path) -> None:
    """Also before the first step, in the middle of a window, and while it evaluates."""
    for check in range(1, 30, 2):
        path = tmp_path / str(check)
        code = train_here(path, whole.body, stop=lambda run_dir, n=check: StopAtCheck(run_dir, n))
        if code == EXIT_FINISHED:
            break
        assert code == EXIT_STOPPED
        assert train_here(path, whole.body, attempt=2) == EXIT_FINISHED
        whole.assert_equal(path)
    assert check > 20
    whole.assert_equal(path)


def test_a_run_that_is_stopped_at_every_turn_still_gets_there(whole: Whole, tmp_path: Path) -> None:
    codes = []
    while EXIT_FINISHED not in codes and len(codes) < 10:
        attempt = len(codes) + 1
        codes.append(train_here(tmp_path / "run", whole.body, attempt, stop=lambda run_dir: StopAtCheck(run_dir, 9)))
    assert codes == [EXIT_STOPPED] * (len(codes) - 1) + [EXIT_FINISHED]
    assert len(codes) > 3
    whole.assert_equal(tmp_path / "run")


def test_a_supervisor_that_is_gone_stops_the_run_with_a_checkpoint(whole: Whole, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.touch_heartbeat()
    os.utime(run_dir.heartbeat, (time.time() - 301, time.time() - 301))
    assert train_here(run_dir.path, whole.body) == EXIT_STOPPED
    assert last_event(run_dir.path).data == {"reason": "the supervisor is gone"}
    run_dir.touch_heartbeat()
    assert train_here(run_dir.path, whole.body, attempt=2) == EXIT_FINISHED
    whole.assert_equal(run_dir.path)


def cut_back(whole: Whole, path: Path, step: int) -> Path:
    """The directory of a run whose machine failed after this step, with what stood on the disk by then."""
    shutil.copytree(whole.path, path)
    for checkpoint in RunDir(path).list_checkpoints():
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(path / whole.result)
    lines = RunDir(path).events.read_bytes().splitlines(keepends=True)
    kept = [line for line, event in zip(lines, events_of(path), strict=True) if event.step <= step + 1]
    RunDir(path).events.write_bytes(b"".join(kept) + b'{"seq": 99, "at": 1.0, "att')
    return path


def test_after_a_crash_steps_beyond_the_checkpoint_are_done_again_and_come_out_the_same(
    whole: Whole, tmp_path: Path
) -> None:
    path = cut_back(whole, tmp_path / "run", 4)
    assert train_here(path, whole.body, attempt=2) == EXIT_FINISHED
    steps = [(event.attempt, event.step) for event in events_of(path, "metrics")]
    assert steps == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 5), (2, 6)]
    assert [event.seq for event in events_of(path)] == list(range(1, len(events_of(path)) + 1))
    whole.assert_equal(path)


@pytest.mark.parametrize("damage", ["flipped bit", "cut off", "no manifest"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    whole: Whole, tmp_path: Path, damage: str
) -> None:
    path = cut_back(whole, tmp_path / "run", 4)
    newest = path / "checkpoints" / "step-00000004"
    state = newest / "state.pt"
    content = bytearray(state.read_bytes())
    if damage == "flipped bit":
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
    elif damage == "cut off":
        state.write_bytes(content[:100])
    else:
        (newest / "manifest.json").unlink()
    assert train_here(path, whole.body, attempt=2) == EXIT_FINISHED
    assert next(event for event in events_of(path) if event.attempt == 2 and event.type == "started").step == 2
    if damage != "no manifest":
        (warning,) = events_of(path, "warning")
        assert "step-00000004 is damaged" in warning.data["message"]
        assert newest.with_name("step-00000004.bad").exists()
    whole.assert_equal(path)


def test_what_a_killed_writer_left_beside_is_removed(whole: Whole, tmp_path: Path) -> None:
    path = cut_back(whole, tmp_path / "run", 4)
    for leftover in (path / "checkpoints" / ".step-00000006", path / ".adapter"):
        (leftover / "adapter").mkdir(parents=True)
        (leftover / "adapter" / "adapter_model.safetensors").write_bytes(b"half")
    assert train_here(path, whole.body, attempt=2) == EXIT_FINISHED
    assert not list(path.rglob(".*"))
    whole.assert_equal(path)


# Whose checkpoint it is


@pytest.mark.parametrize(
    "change", ["learning rate", "rows", "max_seq_len", "base model", "chat template", "tokenizer", "adapter"]
)
def test_a_checkpoint_of_another_job_is_refused_and_stays_as_it_is(whole: Whole, tmp_path: Path, change: str) -> None:
    path = cut_back(whole, tmp_path / "run", 4)
    body = read_json(path / "spec.json")
    if change == "learning rate":
        body["method"]["supervised"]["hyperparameters"]["learning_rate"] = 0.02
    elif change == "rows":
        body["training_file"] = str(write_rows(tmp_path / "rows.jsonl", make_rows(11)))
    elif change == "base model":
        body["model"] = str(save_model(tmp_path / "other", seed=9))
    elif change == "max_seq_len":
        body["method"]["supervised"]["hyperparameters"]["max_seq_len"] = 30
    elif change in ("chat template", "tokenizer"):
        # The weights are the same, and the tokens are not.
        body["model"] = str(shutil.copytree(body["model"], tmp_path / "base"))
        name = {"chat template": "chat_template.jinja", "tokenizer": "tokenizer.json"}[change]
        file = tmp_path / "base" / name
        old, new = {"chat template": ("<|turn|>", "<|turn|> "), "tokenizer": ("<|turn|>", "<|role|>")}[change]
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    else:
        body["adapter"] = {"dropout": 0.3, "r": 4}
    assert train_here(path, body, attempt=2) == EXIT_FAILED
    assert last_event(path).data["code"] == "other_run"
    assert "choose another run directory" in last_event(path).data["message"]
    assert [step_of(checkpoint) for checkpoint in RunDir(path).list_checkpoints()] == [2, 4]


@pytest.mark.parametrize("version", [None, 0, 2])
def test_a_checkpoint_of_another_version_is_refused_and_its_weights_are_a_start(
    whole: Whole, tmp_path: Path, version: int | None
) -> None:
    path = cut_back(whole, tmp_path / "run", 4)
    for checkpoint in RunDir(path).list_checkpoints():
        manifest = read_json(checkpoint / "manifest.json")
        assert manifest.pop("format") == 1
        about = manifest if version is None else {**manifest, "format": version}
        (checkpoint / "manifest.json").write_text(json.dumps(about))
    assert train_here(path, whole.body, attempt=2) == EXIT_FAILED
    failure = last_event(path).data
    assert (failure["code"], failure["fault"]) == ("other_version", "config")
    assert "written by another version" in failure["message"]
    assert [step_of(checkpoint) for checkpoint in RunDir(path).list_checkpoints()] == [2, 4]
    assert train_here(tmp_path / "next", {**whole.body, "resume_from": str(checkpoint)}) == EXIT_FINISHED


def test_the_same_content_in_another_place_is_the_same_job(whole: Whole, tmp_path: Path) -> None:
    path = cut_back(whole, tmp_path / "run", 4)
    body = read_json(path / "spec.json")
    body["model"] = shutil.copytree(body["model"], tmp_path / "base")
    for name in ("training_file", "validation_file"):
        body[name] = shutil.copy(body[name], tmp_path)
    body["model"] = str(body["model"])
    body |= {"suffix": "moved", "metadata": {"why": "another host"}, "resources": {"gpus": 0}}
    assert train_here(path, body, attempt=2) == EXIT_FINISHED
    whole.assert_equal(path)


def test_checkpoints_are_read_without_unpickling_code(whole: Whole) -> None:
    state = torch.load(whole.path / "checkpoints" / "step-00000002" / "state.pt", weights_only=True)
    assert set(state) == {"optimizer", "random"}


def test_every_random_number_generator_is_taken_and_put_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    state = RandomState.take()
    first = draw()
    assert draw() != first
    RandomState(**state.as_dict()).restore()
    assert draw() == first


# Real processes


def start(run_dir: RunDir, body: dict[str, Any], attempt: int) -> subprocess.Popen[bytes]:
    run_dir.path.mkdir(exist_ok=True)
    write_json(run_dir.spec, body)
    with run_dir.log.open("ab") as log:
        command, environment = make_command(run_dir.path, attempt), make_environment(os.environ)
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def wait_for_step(run_dir: RunDir, step: int) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if run_dir.events.exists() and any(e.step >= step for e in events_of(run_dir.path, "metrics")):
            return
        time.sleep(0.02)
    raise AssertionError(run_dir.log.read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_gets_a_signal_in_mid_training_is_gone_on_with(tmp_path: Path, number: signal.Signals) -> None:
    whole = Whole(tmp_path, hyper={"n_epochs": 25, "eval_steps": 30, "save_steps": 8}, adapter={"dropout": 0.3})
    run_dir = RunDir(tmp_path / "run")
    process = start(run_dir, whole.body, 1)
    wait_for_step(run_dir, 18)
    process.send_signal(number)
    code = process.wait(60)
    if number == signal.SIGTERM:
        assert code == EXIT_STOPPED
        assert last_event(run_dir.path).data == {"reason": "asked by SIGTERM"}
        assert step_of(RunDir(run_dir.path).list_checkpoints()[-1]) == last_event(run_dir.path).step
    else:
        assert code == -signal.SIGKILL
        assert last_event(run_dir.path).type not in ("stopped", "finished")
    assert train_here(run_dir.path, whole.body, attempt=2) == EXIT_FINISHED
    whole.assert_equal(run_dir.path)
