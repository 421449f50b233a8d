"""A run whose validation loss falls no more ends there, and its result is what was best."""

import math
from pathlib import Path
from typing import Any

import pytest
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

from tests.tiny import make_labelled, make_pairs, make_plan, make_rows, write_rows
from training.errors import SpecError
from training.launch import make_line
from training.rank.checkpoint import Progress
from training.rank.early_stopping import note_evaluation, patience_is_out
from training.rundir import EXIT_FINISHED, EXIT_STOPPED, RunDir, read_manifest, verify
from training.spec import EarlyStopping, parse_spec

HYPER = {"n_epochs": 8, "learning_rate": 0.03, "lr_scheduler": "constant", "eval_steps": 1, "save_steps": 100}
CONTRARY = {"role": "assistant", "content": "blue stone, salt AND MORE"}
"""What the validation rows answer: to learn the training rows makes it soon less likely, for good."""


def job_of(
    folder: Path, *, patience: int = 3, adapter: Any = None, method: str = "supervised", **hyper: Any
) -> dict[str, Any]:
    hyper = {**HYPER, "early_stopping": {"patience": patience}, **hyper}
    body = make_job(folder, hyper=hyper, adapter=adapter or {"dropout": 0.1}, method=method)
    rows: list[dict[str, Any]] = [{"messages": [row["messages"][0], CONTRARY]} for row in make_rows(2)]
    if method == "dpo":
        # To prefer what the training rows prefer is good for the second pair only.
        rows = [{**pair, "preferred_output": [CONTRARY]} for pair in make_pairs(1)] + make_pairs(1, start=1)
    if method == "kto":
        rows = [{**row, "label": not row["label"]} for row in make_labelled(3)] + make_labelled(1, start=3)
    write_rows(folder / "validation.jsonl", rows)
    return body


def losses_of(path: Path) -> dict[int, float]:
    return {step: data["eval_loss"] for (step, kind), data in curve_of(path).items() if kind == "evaluated"}


@pytest.mark.parametrize(
    ("adapter", "method"),
    [
        ({"dropout": 0.1}, "supervised"),
        ({"type": "full"}, "supervised"),
        ({"type": "qlora", "dropout": 0.1}, "supervised"),
        ({"dropout": 0.1}, "dpo"),
        ({"dropout": 0.1}, "kto"),
        ({"type": "qlora"}, "dpo"),
    ],
)
def test_the_run_ends_when_patience_is_out_and_gives_the_best_weights_bit_for_bit(
    adapter: dict[str, Any], method: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    assert train_here(path, job_of(tmp_path, adapter=adapter, method=method)) == EXIT_FINISHED
    losses = losses_of(path)
    best = min(losses, key=lambda step: losses[step])
    told, finished = events_of(path, "early_stopped", "finished")
    assert max(losses) == best + 3 == finished.data["steps"] < read_json(path / "plan.json")["steps"]
    assert (finished.data["best_step"], finished.data["best_eval_loss"]) == (best, losses[best])
    assert (told.step, told.data["best_step"]) == (best + 3, best)
    assert f"lowest at step {best}" in str(make_line(told, 24))
    kind = "model" if adapter.get("type") == "full" else "adapter"
    kept = {path.name: path for path in RunDir(path).list_checkpoints()}
    assert same_weights(path / kind, kept[f"step-{best:08d}"] / kind)
    assert not same_weights(path / kind, kept[f"step-{best + 3:08d}"] / kind)
    assert verify(path / kind) is None
    assert read_manifest(path / kind)["step"] == best


def test_a_run_that_comes_to_its_end_gives_the_best_weights_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert train_here(path, job_of(tmp_path, patience=1000, n_epochs=2)) == EXIT_FINISHED
    losses = losses_of(path)
    best = min(losses, key=lambda step: losses[step])
    assert best < max(losses) == 6
    assert events_of(path, "early_stopped") == []
    assert same_weights(path / "adapter", path / "checkpoints" / f"step-{best:08d}" / "adapter")


def test_an_interrupted_run_stops_early_at_the_same_step_with_the_same_bits(tmp_path: Path) -> None:
    whole, body = tmp_path / "whole", job_of(tmp_path)
    assert train_here(whole, body) == EXIT_FINISHED
    for check in (11, 20, 38):
        path, attempt = tmp_path / f"run-{check}", 1
        while train_here(path, body, attempt, stop=lambda run_dir, n=check: StopAtCheck(run_dir, n)) == EXIT_STOPPED:
            attempt += 1
        assert attempt > 1
        assert curve_of(path) == curve_of(whole)
        assert without_times(last_event(path).data) == without_times(last_event(whole).data)
        assert same_weights(path / "adapter", whole / "adapter")


def test_a_run_that_stopped_early_and_is_started_again_trains_no_further(tmp_path: Path) -> None:
    path, body = tmp_path / "run", job_of(tmp_path)
    assert train_here(path, body) == EXIT_FINISHED
    before = last_event(path).data
    assert train_here(path, body, attempt=2) == EXIT_FINISHED
    assert [event.type for event in events_of(path) if event.attempt == 2] == [
        "started", "plan", "early_stopped", "finished"
    ]  # fmt: skip
    assert last_event(path).data == before


def test_a_best_checkpoint_that_is_damaged_is_told_and_not_delivered(tmp_path: Path) -> None:
    path, body = tmp_path / "run", job_of(tmp_path)
    assert train_here(path, body) == EXIT_FINISHED
    best = path / "checkpoints" / f"step-{last_event(path).data['best_step']:08d}"
    (best / "adapter" / "adapter_model.safetensors").write_bytes(b"gone")
    assert train_here(path, body, attempt=2) == EXIT_FINISHED
    (warning,) = events_of(path, "warning")
    assert warning.data["code"] == "best_checkpoint_lost"
    assert last_event(path).data["best_step"] is None
    newest = RunDir(path).list_checkpoints()[-1]
    assert same_weights(path / "adapter", newest / "adapter")


def decide(*losses: float, patience: int = 2, min_delta: float = 0.0) -> tuple[int | None, int | None]:
    """The best step, and the one at which patience is out."""
    plan = make_plan(early_stopping=EarlyStopping(patience=patience, min_delta=min_delta))
    progress = Progress()
    for step, loss in enumerate(losses, 1):
        progress.step = step
        note_evaluation(progress, plan, loss)
        if patience_is_out(progress, plan):
            return progress.best_step, step
    return progress.best_step, None


def test_what_counts_as_a_gain() -> None:
    assert decide(3.0, 2.0, 2.5, 1.9, 2.0, 2.0) == (4, 6)
    assert decide(3.0, 3.0, 3.0) == (1, 3), "the first of equal ones, and equal is no gain"
    assert decide(3.0, 2.95, 2.91, min_delta=0.1) == (3, 3), "too little, but the lowest is the best all the same"
    assert decide(3.0, 2.95, 2.85, 2.8, 2.7, min_delta=0.1) == (5, None), "small falls add up"
    assert decide(math.nan, math.inf) == (None, 2), "what is not finite is never best"


def test_it_needs_a_validation_file() -> None:
    body = {"model": "m", "training_file": "t"}
    for place in ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"early_stopping": {}}}}},
                  {"hyperparameters": {"early_stopping": {"patience": 2}}}):  # fmt: skip
        with pytest.raises(SpecError, match="needs a validation_file") as refused:
            parse_spec({**body, **place})
        assert str(refused.value.param).endswith("hyperparameters.early_stopping")
        assert parse_spec({**body, **place, "validation_file": "v"}).hyper.early_stopping is not None


@pytest.mark.parametrize(("given", "at"), [({"patience": 0}, "patience"), ({"min_delta": -1}, "min_delta")])
def test_its_numbers_are_checked(given: dict[str, Any], at: str) -> None:
    body = {"model": "m", "training_file": "t", "validation_file": "v", "hyperparameters": {"early_stopping": given}}
    with pytest.raises(SpecError) as refused:
        parse_spec(body)
    assert refused.value.param == f"hyperparameters.early_stopping.{at}"


def test_its_unknown_fields_are_named() -> None:
    body = {"model": "m", "training_file": "t", "validation_file": "v"}
    with pytest.raises(SpecError, match='did you mean "patience"'):
        parse_spec({**body, "hyperparameters": {"early_stopping": {"patiense": 1}}})
