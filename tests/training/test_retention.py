"""Old checkpoints go; the newest and the best stay, and what is left is enough to go on from."""

from pathlib import Path

import pytest
from tiny_runs import StopAtCheck, curve_of, make_job, read_json, same_weights, train_here

from training.retention import choose_expired, find_needed
from training.rundir import EXIT_FINISHED, EXIT_STOPPED, RunDir, step_of


@pytest.mark.parametrize(
    ("losses", "limit", "expired"),
    [
        ({1: None, 2: None, 3: None}, 3, []),
        ({1: None, 2: None, 3: None}, 2, [1]),
        ({1: None, 2: None, 3: None}, 1, [1, 2]),
        ({1: 0.1, 2: 0.5, 3: 0.6, 4: 0.7}, 2, [2, 3]),
        ({1: 0.1, 2: 0.5, 3: 0.6, 4: 0.7}, 3, [2]),
        ({1: 0.5, 2: 0.1, 3: 0.6}, 1, [1]),
        ({1: 0.5, 2: 0.5, 3: None}, 1, [2]),
        ({}, 1, []),
    ],
)
def test_the_newest_and_the_best_are_kept(losses: dict[int, float | None], limit: int, expired: list[int]) -> None:
    assert choose_expired(losses, limit, set()) == expired


def test_what_the_run_may_come_back_to_is_kept_as_well() -> None:
    needed = find_needed({"best_step": 2, "way_back_step": 4, "step": 3})
    assert choose_expired(dict.fromkeys(range(1, 8)), 3, needed) == [1, 3, 5, 6]
    assert find_needed({"best_step": None}) == set()


def test_a_run_keeps_as_many_as_asked_and_what_is_removed_is_gone(tmp_path: Path) -> None:
    body = make_job(tmp_path, hyper={"save_steps": 1, "eval_steps": 3, "save_total_limit": 2})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    steps = [step_of(path) for path in RunDir(tmp_path / "run").list_checkpoints()]
    losses = {
        step: data["eval_loss"] for (step, kind), data in curve_of(tmp_path / "run").items() if kind == "evaluated"
    }
    best = min(losses, key=lambda step: losses[step])
    assert steps == sorted({5 if best == 6 else best, 6})
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {f"step-{step:08d}" for step in steps}


def test_a_run_with_one_checkpoint_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    hyper = {"save_steps": 1, "save_total_limit": 1}
    body = make_job(tmp_path, hyper=hyper, adapter={"dropout": 0.3})
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    path = tmp_path / "run"
    assert train_here(path, body, stop=lambda run_dir: StopAtCheck(run_dir, 15)) == EXIT_STOPPED
    assert train_here(path, body, attempt=2) == EXIT_FINISHED
    assert curve_of(path) == curve_of(tmp_path / "whole")
    assert same_weights(path / "adapter", tmp_path / "whole" / "adapter")


def test_automatic_is_as_many_as_fit_and_says_so(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path)) == EXIT_FINISHED
    plan = read_json(tmp_path / "run" / "plan.json")
    assert plan["save_total_limit"] == 10
    assert "32 GiB" in plan["reasons"]["save_total_limit"]
