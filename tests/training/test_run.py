"""A run from its directory to its end: what it tells, what it leaves, and how it says that it failed."""

import errno
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import curve_of, events_of, last_event, make_job, read_json, same_weights, train_here, weights_of

from tests.tiny import make_rows, save_model, write_rows
from training.errors import CapacityError, StorageError
from training.rank import loop, weights
from training.rank.failure import explain
from training.rank.lock import lock
from training.rundir import EXIT_FAILED, EXIT_FINISHED, RunDir, read_manifest, verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that went well, in a folder with its model and its data."""
    folder = tmp_path_factory.mktemp("finished")
    assert train_here(folder / "run", make_job(folder)) == EXIT_FINISHED
    return folder / "run"


def job_with(folder: Path, *, rows: Any = None, **hyper: Any) -> dict[str, Any]:
    body = make_job(folder, hyper=hyper)
    if rows is not None:
        write_rows(folder / "rows.jsonl", rows)
    return body


# What is told


def test_the_events_of_a_run_are_these(finished: Path) -> None:
    events = events_of(finished)
    assert [(event.type, event.step) for event in events] == [
        ("started", 0), ("plan", 0),
        ("metrics", 1), ("metrics", 2), ("evaluated", 2), ("checkpoint", 2),
        ("metrics", 3), ("metrics", 4), ("evaluated", 4), ("checkpoint", 4),
        ("metrics", 5), ("metrics", 6), ("evaluated", 6), ("checkpoint", 6),
        ("finished", 6),
    ]  # fmt: skip
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {event.attempt for event in events} == {1}


def test_each_step_tells_its_numbers(finished: Path) -> None:
    steps = [event.data for event in events_of(finished, "metrics")]
    assert all(
        set(data)
        == {
            "train_loss", "learning_rate", "grad_norm", "num_tokens", "num_trained_tokens", "epoch",
            "tokens_per_s", "step_s", "peak_memory_bytes", "flops", "mfu",
        }
        for data in steps
    )  # fmt: skip
    assert [data["epoch"] for data in steps] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert all(data["tokens_per_s"] > 0 and data["peak_memory_bytes"] > 10**7 for data in steps)
    assert steps[5]["num_tokens"] == 2 * steps[2]["num_tokens"]
    assert steps[5]["num_trained_tokens"] == 2 * steps[2]["num_trained_tokens"]
    assert steps[-1]["train_loss"] < steps[0]["train_loss"]


def test_the_plan_is_told_and_kept(finished: Path) -> None:
    (event,) = events_of(finished, "plan")
    assert event.data == read_json(finished / "plan.json")
    assert event.data["steps"] == 6
    assert event.data["counts"]["trained_rows"] == 10


def test_the_start_tells_the_device_and_the_end_sums_up(finished: Path) -> None:
    started, ended = events_of(finished, "started", "finished")
    assert started.data["resumed_from"] is None
    assert started.data["device"] in ("cpu", "cuda")
    last = curve_of(finished)
    assert ended.data["steps"] == 6
    assert ended.data["trained_tokens"] == last[6, "metrics"]["num_trained_tokens"]
    assert ended.data["train_loss"] == last[6, "metrics"]["train_loss"]
    assert ended.data["eval_loss"] == last[6, "evaluated"]["eval_loss"]
    assert ended.data["seconds"] > 0


def test_checkpoints_are_whole_and_told_with_size_and_losses(finished: Path) -> None:
    events = events_of(finished, "checkpoint")
    for event in events:
        folder = finished / event.data["path"]
        assert verify(folder) is None
        assert event.data["bytes"] == sum(file["bytes"] for file in read_manifest(folder)["files"])
        assert event.data["train_loss"] == curve_of(finished)[event.step, "metrics"]["train_loss"]
        assert event.data["eval_loss"] == curve_of(finished)[event.step, "evaluated"]["eval_loss"]
    assert [path.name for path in RunDir(finished).list_checkpoints()] == [f"step-0000000{step}" for step in (2, 4, 6)]


def test_nothing_is_left_beside_and_the_last_checkpoint_is_the_result(finished: Path) -> None:
    left = {path.name for path in finished.iterdir()}
    assert left == {"spec.json", "plan.json", "events.jsonl", "lock", "checkpoints", "adapter"}
    assert same_weights(finished / "adapter", finished / "checkpoints" / "step-00000006" / "adapter")


def test_the_same_run_again_gives_the_same_bits(finished: Path, tmp_path: Path) -> None:
    body = read_json(finished / "spec.json")
    train_here(tmp_path / "again", body)
    assert curve_of(tmp_path / "again") == curve_of(finished)
    names = [file["name"] for file in read_manifest(finished / "adapter")["files"]]
    assert names
    for name in names:
        assert (tmp_path / "again" / "adapter" / name).read_bytes() == (finished / "adapter" / name).read_bytes()


def test_a_finished_run_that_is_started_again_only_says_so_again(finished: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    assert train_here(copy, read_json(copy / "spec.json"), attempt=2) == EXIT_FINISHED
    again = [event for event in events_of(copy) if event.attempt == 2]
    assert [(event.type, event.step) for event in again] == [("started", 6), ("plan", 6), ("finished", 6)]
    assert again[-1].data == last_event(finished).data
    assert same_weights(copy / "adapter", finished / "adapter")


@pytest.mark.parametrize(("micro", "cuts"), [(1, 4), (2, 2), (4, 1)])
def test_the_curve_does_not_depend_on_how_a_batch_is_cut(finished: Path, tmp_path: Path, micro: int, cuts: int) -> None:
    body = job_with(tmp_path, micro_batch_size=micro, gradient_accumulation_steps=cuts)
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    want, got = (curve_of(path, with_flops=False) for path in (finished, tmp_path / "run"))
    assert got.keys() == want.keys()
    for place, data in want.items():
        for name, value in data.items():
            assert got[place][name] == pytest.approx(value, rel=2e-5), (place, name)


def test_rows_that_are_cut_or_left_out_are_told_as_warnings(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 300}]}
    assert train_here(tmp_path / "run", job_with(tmp_path, rows=[*make_rows(6), long], n_epochs=1)) == EXIT_FINISHED
    (warning,) = events_of(tmp_path / "run", "warning")
    assert warning.data["param"] == "training_file"
    assert warning.data["line"] == 7
    assert "256 tokens" in warning.data["message"]


def test_without_a_validation_file_nothing_is_evaluated(tmp_path: Path) -> None:
    body = job_with(tmp_path, max_steps=2, n_epochs="auto")
    del body["validation_file"]
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    assert events_of(tmp_path / "run", "evaluated") == []
    assert last_event(tmp_path / "run").data["eval_loss"] is None


def test_a_run_of_one_step_trains(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", job_with(tmp_path, max_steps=1, n_epochs="auto")) == EXIT_FINISHED
    trained = weights_of(tmp_path / "run" / "adapter")
    assert all(bool(weight.any()) for weight in trained.values())


def test_bf16_keeps_fp32_masters_so_that_small_updates_are_not_lost(tmp_path: Path) -> None:
    # Published in bf16: to read it rounds nothing, which would look like movement.
    save_model(tmp_path / "base", dtype=torch.bfloat16)
    body = make_job(tmp_path, hyper={"learning_rate": 1e-5, "max_steps": 2, "n_epochs": "auto"}, precision="bf16")
    body["adapter"] = {"type": "full"}
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    base = weights_of(tmp_path / "base")
    trained = weights_of(tmp_path / "run" / "checkpoints" / "step-00000002" / "model")
    inner = [name for name in base if "layers" in name]
    moved = sum(int((trained[name] != base[name]).sum()) for name in inner)
    assert moved / sum(base[name].numel() for name in inner) > 0.99


# How a run fails


def failure_of(path: Path, body: dict[str, Any]) -> dict[str, Any]:
    assert train_here(path, body) == EXIT_FAILED
    event = last_event(path)
    assert event.type == "failed"
    return event.data


@pytest.mark.parametrize(
    ("change", "code", "fault", "said"),
    [
        ({"model": "/nowhere/model"}, "invalid_model", "config", "no such folder"),
        ({"training_file": "/nowhere/rows.jsonl"}, "invalid_data", "data", "no such file"),
        ({"training_file": "/"}, "invalid_data", "data", "training_file: / is a folder"),
        ({"adapter": {"target_modules": ["q_prj"]}}, "invalid_value", "config", "did you mean q_proj"),
        ({"resources": {"gpus": 1}}, "no_such_device", "config", "1 asked"),
        ({"suffixx": "a"}, "unknown_field", "config", "suffix"),
    ],
)
def test_what_is_refused_is_told_with_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any], code: str, fault: str, said: str
) -> None:
    failure = failure_of(tmp_path / "run", {**make_job(tmp_path), **change})
    assert (failure["code"], failure["fault"]) == (code, fault)
    assert failure["param"] is not None
    assert said in failure["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_bad_row_is_told_with_its_line(tmp_path: Path) -> None:
    failure = failure_of(tmp_path / "run", job_with(tmp_path, rows=[*make_rows(2), {"messages": 3}]))
    assert failure["fault"] == "data"
    assert failure["message"].startswith("line 3, messages")


def test_a_loss_that_is_not_finite_ends_the_run_at_that_step_and_is_not_saved(tmp_path: Path) -> None:
    body = job_with(tmp_path, learning_rate=1e9, save_steps=1, max_grad_norm=0.0)
    failure = failure_of(tmp_path / "run", body)
    assert failure["code"] in ("non_finite_loss", "non_finite_weights")
    for checkpoint in RunDir(tmp_path / "run").list_checkpoints():
        assert all(bool(torch.isfinite(weight).all()) for weight in weights_of(checkpoint / "adapter").values())


def test_a_loss_that_is_not_finite_is_shown_as_such(tmp_path: Path) -> None:
    body = job_with(tmp_path, n_epochs=1)
    spoil(tmp_path / "base" / "model.safetensors")
    failure = failure_of(tmp_path / "run", body)
    assert failure["code"] == "non_finite_loss"
    assert "the loss of step 1 is not finite (rows of lines" in failure["message"]
    (metrics,) = events_of(tmp_path / "run", "metrics")
    assert metrics.data["train_loss"] is None
    assert "train_loss" in metrics.data["non_finite"]
    assert RunDir(tmp_path / "run").list_checkpoints() == []
    assert not (tmp_path / "run" / "adapter").exists()


def spoil(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = loop.learning_rate_at
    monkeypatch.setattr(loop, "learning_rate_at", lambda step, plan: math.inf if step == 4 else healthy(step, plan))
    failure = failure_of(tmp_path / "run", job_with(tmp_path))
    assert failure["code"] == "non_finite_weights"
    assert [path.name for path in RunDir(tmp_path / "run").list_checkpoints()] == ["step-00000002"]


def test_an_unexpected_error_is_told_readably_and_its_traceback_goes_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "learning_rate_at", lambda _step, _plan: {}["gone"])
    failure = failure_of(tmp_path / "run", job_with(tmp_path))
    assert (failure["code"], failure["fault"]) == ("internal_error", "bug")
    assert "KeyError" in failure["message"]
    assert "Traceback" not in failure["message"]
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_told_with_what_to_change(error: Exception) -> None:
    told = explain(error)
    assert isinstance(told, CapacityError)
    assert told.code == "out_of_memory"
    assert "micro_batch_size" in told.message


def test_a_full_disk_fails_the_run_and_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = weights.save_file

    def save_file(tensors: Any, path: Path, **about: Any) -> None:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written(tensors, path, **about)

    monkeypatch.setattr(weights, "save_file", save_file)
    body = job_with(tmp_path)
    failure = failure_of(tmp_path / "run", body)
    assert failure == StorageError(failure["message"]).as_dict()
    assert failure["retryable"]
    (kept,) = RunDir(tmp_path / "run").list_checkpoints()
    assert verify(kept) is None
    monkeypatch.undo()
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_two_processes_do_not_work_in_one_directory(tmp_path: Path) -> None:
    body = job_with(tmp_path)
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run" / "lock"), pytest.raises(BlockingIOError):
        train_here(tmp_path / "run", body)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_every_line_of_the_events_is_strict_json(finished: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    for line in (finished / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
