"""Faults planted in data and weights: what is told, what is changed, and that a resumed run comes to the same."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import StopAtCheck, curve_of, events_of, last_event, make_job, same_weights, train_here, weights_of

from tests.tiny import make_rows, write_rows
from training.errors import SpecError
from training.plan import Plan
from training.rank import loop
from training.rank.order import make_order
from training.rank.parallel import SingleDevice
from training.rank.stability import WINDOW_STEPS, spike_limit
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RunDir
from training.spec import parse_spec

ROWS = 40
BAD_STEP = 15
"""Of 20 steps, two rows each."""


def make_bad_job(folder: Path, content: str, *, save_steps: int = 4, **more: Any) -> tuple[dict[str, Any], int]:
    """A job with one row that answers this in step 15, and the line of that row."""
    bad_row = make_order(ROWS, 0, 0)[2 * BAD_STEP - 1]
    rows = make_rows(ROWS)
    rows[bad_row]["messages"][1]["content"] = content
    hyper = {"n_epochs": 1, "batch_size": 2, "save_steps": save_steps, "eval_steps": 100, "lr_scheduler": "constant"}
    body = make_job(folder, hyper={**hyper, **more.pop("hyper", {})}, **more)
    write_rows(folder / "rows.jsonl", rows)
    return body, bad_row + 1


@pytest.fixture(scope="module")
def sure_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that knows the other rows already."""
    folder = tmp_path_factory.mktemp("sure")
    hyper = {"n_epochs": 25, "learning_rate": 0.01, "eval_steps": 100, "save_steps": 100}
    assert train_here(folder / "run", make_job(folder, rows=16, hyper=hyper, adapter={"type": "full"})) == EXIT_FINISHED
    return folder / "run" / "model"


def make_spiking_job(folder: Path, sure_base: Path, **stability: Any) -> tuple[dict[str, Any], int]:
    """One row answers in letters that the base expects nowhere."""
    shutil.copytree(sure_base, folder / "base")
    return make_bad_job(folder, "\x01\x02\x03\x04\x05" * 9, stability={"spike_factor": 4, **stability})


def make_nan_job(folder: Path, sure_base: Path, *, save_steps: int = 4, **stability: Any) -> tuple[dict[str, Any], int]:
    """The base has no finite embedding of the letter Q, which one row holds."""
    shutil.copytree(sure_base, folder / "base")
    file = folder / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][ord("Q") - ord("!")] = math.nan  # the byte-level alphabet begins with "!"
    save_file(tensors, file, metadata={"format": "pt"})
    return make_bad_job(folder, "red QQ red", save_steps=save_steps, stability=stability)


def checkpoint_of(path: Path, step: int) -> Path:
    return path / "checkpoints" / f"step-{step:08d}"


def rates_of(path: Path) -> dict[int, float]:
    return {step: data["learning_rate"] for (step, kind), data in curve_of(path).items() if kind == "metrics"}


# Data


def test_a_spike_is_told_with_step_and_line_and_trained_all_the_same(tmp_path: Path, sure_base: Path) -> None:
    body, line = make_spiking_job(tmp_path, sure_base)
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    (warning,) = events_of(tmp_path / "run", "warning")
    assert (warning.step, warning.data["code"], warning.data["action"]) == (BAD_STEP, "loss_spike", "report")
    assert warning.data["lines"] == [line]
    assert f"the loss of step {BAD_STEP} is" in warning.data["message"]
    assert f"(rows of lines {line})" in warning.data["message"]


def test_a_spike_stops_the_run_where_this_is_asked(tmp_path: Path, sure_base: Path) -> None:
    body, line = make_spiking_job(tmp_path, sure_base, on_spike="stop")
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    failure = last_event(tmp_path / "run").data
    assert failure["code"] == "loss_spike"
    assert f"lines {line})" in failure["message"]
    assert [path.name for path in RunDir(tmp_path / "run").list_checkpoints()][-1] == "step-00000012"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "adapter"),
    [
        (make_spiking_job, {}),
        (make_spiking_job, {"type": "full"}),
        (make_nan_job, {}),
        (make_nan_job, {"type": "qlora"}),
    ],
    ids=["spike, lora", "spike, full", "nan, lora", "nan, qlora"],
)
def test_a_skipped_batch_changes_no_weights_and_no_moments(
    make: Callable[..., tuple[dict[str, Any], int]],
    adapter: dict[str, Any],
    precision: str,
    tmp_path: Path,
    sure_base: Path,
) -> None:
    kind = "model" if adapter.get("type") == "full" else "adapter"
    body, line = make(tmp_path, sure_base)
    body |= {"adapter": adapter, "stability": {"on_spike": "skip", "on_nan": "skip", "spike_factor": 4}}
    body["precision"] = precision
    body["method"]["supervised"]["hyperparameters"] |= {"save_steps": 1, "save_total_limit": 100}
    path = tmp_path / "run"
    assert train_here(path, body) == EXIT_FINISHED
    (warning,) = events_of(path, "warning")
    assert (warning.step, warning.data["action"], warning.data["lines"]) == (BAD_STEP, "skip", [line])
    before, after = checkpoint_of(path, BAD_STEP - 1), checkpoint_of(path, BAD_STEP)
    assert same_weights(before / kind, after / kind)
    assert not same_weights(after / kind, checkpoint_of(path, BAD_STEP + 1) / kind)
    states = [torch.load(folder / "state.pt", weights_only=True)["optimizer"]["state"] for folder in (before, after)]
    assert all(torch.equal(states[0][n]["exp_avg"], states[1][n]["exp_avg"]) for n in states[0])
    tokens = {event.step: event.data["num_trained_tokens"] for event in events_of(path, "metrics")}
    assert tokens[BAD_STEP] == tokens[BAD_STEP - 1] < tokens[BAD_STEP + 1]


def test_to_go_back_halves_the_rate_and_a_row_that_is_no_better_then_is_left_out(
    tmp_path: Path, sure_base: Path
) -> None:
    body, line = make_nan_job(tmp_path, sure_base, on_nan="rollback")
    path = tmp_path / "run"
    assert train_here(path, body) == EXIT_FINISHED
    back, left_out = (event.data for event in events_of(path, "warning"))
    assert (back["action"], back["rolled_back_to"], back["rate_factor"]) == ("rollback", 12, 0.5)
    assert (left_out["action"], left_out["lines"]) == ("skip", [line])
    assert [event.step for event in events_of(path, "metrics")] == [*range(1, 16), *range(13, 21)]
    rates = rates_of(path)
    assert rates[12] == pytest.approx(0.01)
    assert rates[13] == rates[20] == pytest.approx(0.005)
    assert all(bool(weight.isfinite().all()) for weight in weights_of(path / "adapter").values())


def test_what_comes_after_going_back_is_what_a_run_at_half_the_rate_from_there_gives(
    tmp_path: Path, sure_base: Path
) -> None:
    """The reference has the lower rate from step 13 on by its schedule, and no fault until step 15."""
    body, _ = make_nan_job(tmp_path, sure_base, save_steps=1, on_nan="rollback")
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    with pytest.MonkeyPatch.context() as patch:
        healthy = loop.learning_rate_at
        patch.setattr(loop, "learning_rate_at", lambda step, plan: healthy(step, plan) * (1 if step <= 14 else 0.5))
        body["stability"] = {"on_nan": "skip"}
        assert train_here(tmp_path / "reference", body) == EXIT_FINISHED
    assert same_weights(tmp_path / "run" / "adapter", tmp_path / "reference" / "adapter")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("make", [make_spiking_job, make_nan_job])
def test_an_interrupted_run_comes_to_the_same_bits(make: Any, policy: str, tmp_path: Path, sure_base: Path) -> None:
    body, _ = make(tmp_path, sure_base)
    body["stability"] = {"on_nan": policy, "on_spike": policy, "spike_factor": 4}
    body["adapter"] = {"dropout": 0.2}
    body["method"]["supervised"]["hyperparameters"]["save_total_limit"] = 1
    whole = tmp_path / "whole"
    assert train_here(whole, body) == EXIT_FINISHED
    for check in (14, 29, 33):
        path, attempt = tmp_path / f"run-{check}", 1
        while train_here(path, body, attempt, stop=lambda run_dir, n=check: StopAtCheck(run_dir, n)) == EXIT_STOPPED:
            attempt += 1
        assert attempt > 1
        assert curve_of(path) == curve_of(whole)
        assert same_weights(path / "adapter", whole / "adapter")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_preferences_go_on_without_the_row_at_fault(method: str, policy: str, tmp_path: Path, sure_base: Path) -> None:
    """The base, which both compare with, has no finite answer to this row either."""
    make_nan_job(tmp_path, sure_base)
    hyper = {"n_epochs": 1, "batch_size": 2, "save_steps": 2, "save_total_limit": 9}
    body = make_job(tmp_path, method=method, hyper=hyper, stability={"on_nan": policy})
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    bad_row = make_order(10, 0, 0)[5]
    row = json.loads(lines[bad_row])
    answer = row["preferred_output"][0] if method == "dpo" else row["messages"][1]
    answer["content"] = "red QQ red"
    write_rows(tmp_path / "rows.jsonl", [row if n == bad_row else json.loads(line) for n, line in enumerate(lines)])
    path = tmp_path / "run"
    assert train_here(path, body) == EXIT_FINISHED
    warnings = events_of(path, "warning")
    assert [event.data["action"] for event in warnings] == (["skip"] if policy == "skip" else ["rollback", "skip"])
    for event in warnings:
        assert event.step == 3 and bad_row + 1 in event.data["lines"]
    rates = rates_of(path)
    assert set(rates) == {1, 2, 3, 4, 5}
    assert all(bool(weight.isfinite().all()) for weight in weights_of(path / "adapter").values())
    assert not same_weights(checkpoint_of(path, 2) / "adapter", checkpoint_of(path, 5) / "adapter")


# Weights


def break_once(patch: pytest.MonkeyPatch, at: int) -> None:
    """A rate without end at this step, the first time that it is made: the weights are ruined."""
    healthy, left = loop.learning_rate_at, [at]

    def rate(step: int, plan: Plan) -> float:
        return math.inf if step in left and not left.remove(step) else healthy(step, plan)

    patch.setattr(loop, "learning_rate_at", rate)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [{"dropout": 0.1}, {"type": "full"}, {"type": "qlora"}])
@pytest.mark.parametrize(("at", "back_to", "code"), [(3, 0, "non_finite_loss"), (8, 4, "non_finite_weights")])
def test_ruined_weights_are_brought_back_from_the_last_checkpoint(
    adapter: dict[str, Any],
    precision: str,
    at: int,
    back_to: int,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At step 3 there is none but the one of the start; at step 8 it is found when they are about to be saved."""
    break_once(monkeypatch, at)
    hyper = {"n_epochs": 4, "save_steps": 4, "eval_steps": 100}
    path = tmp_path / "run"
    body = make_job(tmp_path, hyper=hyper, adapter=adapter, precision=precision, stability={"on_nan": "rollback"})
    assert train_here(path, body) == EXIT_FINISHED
    (warning,) = events_of(path, "warning")
    assert (warning.data["code"], warning.data["rolled_back_to"]) == (code, back_to)
    kind = "model" if adapter.get("type") == "full" else "adapter"
    assert all(bool(weight.isfinite().all()) for weight in weights_of(path / kind).values())
    first, again = (event.data for event in events_of(path, "metrics") if event.step == back_to + 1)
    assert first["train_loss"] == again["train_loss"], "the bits of the checkpoint, dropout included"
    assert again["learning_rate"] == first["learning_rate"] / 2


def spoil_once(patch: pytest.MonkeyPatch, at: int, name: str, row: int) -> None:
    """One number that is none, after this step."""
    healthy, done = SingleDevice.step, []

    def step(parallel: SingleDevice, rate: float) -> None:
        healthy(parallel, rate)
        done.append(rate)
        if len(done) == at:
            weight = next(w for full_name, w in parallel.model.named_parameters() if name in full_name)
            weight.data[row, 0] = math.nan

    patch.setattr(SingleDevice, "step", step)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("adapter", "name", "code"),
    [
        ({}, "lora_A", "non_finite_loss"),
        ({"type": "qlora"}, "lora_B", "non_finite_loss"),
        # Of a letter that no row has: neither loss nor gradient show it.
        ({"type": "full"}, "embed_tokens", "non_finite_weights"),
    ],
    ids=["lora", "qlora", "full, unseen"],
)
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_one_spoilt_weight_is_never_handed_on(
    policy: str,
    adapter: dict[str, Any],
    name: str,
    code: str,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_once(monkeypatch, 6, name, row=3)
    hyper = {"n_epochs": 5, "save_steps": 4, "eval_steps": 100, "save_total_limit": 9}
    body = make_job(tmp_path, hyper=hyper, adapter=adapter, precision=precision, stability={"on_nan": policy})
    path, kind = tmp_path / "run", "model" if adapter.get("type") == "full" else "adapter"
    assert train_here(path, body) == (EXIT_FINISHED if policy == "rollback" else EXIT_FAILED)
    if policy == "rollback":
        (warning,) = events_of(path, "warning")
        assert (warning.data["code"], warning.data["rolled_back_to"]) == (code, 4)
        folders = [*(folder / kind for folder in RunDir(path).list_checkpoints()), path / kind]
    else:
        # Nothing but going back mends weights: to leave out their steps changes nothing.
        assert last_event(path).data["code"] in (code, "non_finite_weights")
        assert not (path / kind).exists()
        folders = [folder / kind for folder in RunDir(path).list_checkpoints()]
        assert [folder.parent.name for folder in folders] == ["step-00000004"]
    assert all(bool(weight.isfinite().all()) for folder in folders for weight in weights_of(folder).values())


def test_ruined_weights_that_only_batches_are_skipped_for_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_once(monkeypatch, 3)
    body = make_job(tmp_path, hyper={"n_epochs": 10, "save_steps": 100}, stability={"on_nan": "skip"})
    del body["validation_file"]
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    failure = last_event(tmp_path / "run").data
    assert failure["code"] == "non_finite_loss"
    assert "as in the 10 steps before" in failure["message"]
    assert RunDir(tmp_path / "run").list_checkpoints() == []


def test_it_goes_back_three_times_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = loop.learning_rate_at
    monkeypatch.setattr(loop, "learning_rate_at", lambda step, plan: math.inf if step >= 4 else healthy(step, plan))
    body = make_job(tmp_path, stability={"on_nan": "rollback"}, hyper={"save_steps": 100})
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    assert "; gone back 3 times; lower the learning_rate" in last_event(tmp_path / "run").data["message"]
    warnings = [event.data for event in events_of(tmp_path / "run", "warning")]
    assert [data["rate_factor"] for data in warnings if data["action"] == "rollback"] == [0.5, 0.25, 0.125]


# The scale


def test_the_limit_is_that_of_median_and_mad() -> None:
    losses = np.random.default_rng(0).normal(2.0, 0.3, 50)
    sigma = 1.4826 * np.median(np.abs(losses - np.median(losses)))
    assert spike_limit(losses.tolist(), 5) == pytest.approx(np.median(losses) + 5 * sigma)
    spoilt = [*losses.tolist()[:-10], *[1e9] * 10]
    assert spike_limit(spoilt, 5) == pytest.approx(spike_limit(losses.tolist(), 5), rel=0.2), "old spikes hardly count"


def test_few_losses_make_no_spike_and_equal_ones_not_of_every_change() -> None:
    assert spike_limit([1.0] * 9, 5) is None
    assert spike_limit([1.0] * 10, 5) == pytest.approx(1.1)


def test_usual_noise_is_no_spike_at_the_default() -> None:
    draw = random.Random(1)
    losses = [3.0 * math.exp(-step / 300) + draw.gauss(0, 0.4) for step in range(2000)]
    told = [n for n in range(10, 2000) if losses[n] > (spike_limit(losses[max(0, n - WINDOW_STEPS) : n], 10) or 1e9)]
    assert told == []


@pytest.mark.parametrize(
    ("given", "at"),
    [({"on_nan": "report"}, "on_nan"), ({"on_spike": 1}, "on_spike"), ({"spike_factor": 0}, "spike_factor")],
)
def test_the_policy_is_checked(given: dict[str, Any], at: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"model": "m", "training_file": "t", "stability": given})
    assert refused.value.param == f"stability.{at}"
