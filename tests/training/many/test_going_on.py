"""A run on several ranks that was stopped goes on: on as many with the same bits, on others with the same weights and
moments."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.many.ranks import Case, assert_same_training, on_ranks, train_on_ranks
from tests.training.tiny_runs import curve_of, events_of, last_event, make_job, same_weights, train_here, without_times
from training.rundir import EXIT_FINISHED, EXIT_STOPPED, step_of

# The first test of a launch waits for all runs of it.
pytestmark = pytest.mark.timeout(900)

JOBS: dict[str, dict[str, Any]] = {
    "lora with dropout": {"adapter": {"dropout": 0.3}},
    "full": {"adapter": {"type": "full"}},
    "kto with dropout": {"method": "kto", "adapter": {"dropout": 0.3}},
}
SAME = [
    *(("ddp", job) for job in JOBS),
    *((strategy, job) for strategy in ("fsdp", "pipeline") for job in ("lora with dropout", "full")),
    *(("zero1", "full"), ("zero2", "lora with dropout"), ("zero3", "lora with dropout"), ("zero3", "full")),
]
LAYOUTS = [
    *(("ddp", "none"), ("fsdp", "none"), ("none", "ddp"), ("none", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")),
    *(("zero2", "none"), ("zero2", "ddp"), ("zero3", "none"), ("none", "zero1"), ("ddp", "zero3")),
    *(("pipeline", "none"), ("pipeline", "ddp"), ("none", "pipeline"), ("fsdp", "pipeline")),
]
"""Where a run is stopped, and where it goes on; `none` is one process, the others are two."""


def result_of(job: str) -> str:
    return "model" if JOBS[job].get("adapter", {}).get("type") == "full" else "adapter"


class Stopped:
    """Runs in one start: each strategy and job whole, and stopped half-way and gone on with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies = {}
        cases = []
        for job, asked in JOBS.items():
            (folder / job).mkdir()
            self.bodies[job] = make_job(folder / job, rows=9, **asked)
        for strategy, job in SAME:
            body = on_ranks(self.bodies[job], 2, strategy)
            again = self.path(strategy, job, "again")
            cases += [Case(self.path(strategy, job, "whole"), body), Case(again, body, 1, stop_rank=1, stop_check=9)]
            cases.append(Case(again, body, attempt=2))
        codes = train_on_ranks(folder, 2, cases)
        assert codes == [[EXIT_FINISHED] * 2, [EXIT_STOPPED] * 2, [EXIT_FINISHED] * 2] * len(SAME)

    def path(self, strategy: str, job: str, which: str) -> Path:
        return self.folder / job / f"{strategy}-{which}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return Stopped(tmp_path_factory.mktemp("stopped"))


@pytest.mark.parametrize(("strategy", "job"), SAME)
def test_a_stopped_run_goes_on_with_the_same_bits(strategy: str, job: str, stopped: Stopped) -> None:
    """Rank 1 alone was asked to stop; both left the same window, and rank 0 told it."""
    whole, again = stopped.path(strategy, job, "whole"), stopped.path(strategy, job, "again")
    (told,) = events_of(again, "stopped")
    assert told.data == {"reason": "asked by the test"}
    assert 0 < told.step < 6
    assert events_of(again, "started")[1].data["resumed_from"] == told.step
    assert curve_of(again) == curve_of(whole)
    assert same_weights(again / result_of(job), whole / result_of(job))
    assert without_times(last_event(again).data) == without_times(last_event(whole).data)


def test_ranks_drop_different_activations(stopped: Stopped) -> None:
    checkpoint = stopped.path("ddp", "lora with dropout", "whole") / "checkpoints" / "step-00000002"
    random = torch.load(checkpoint / "state.pt", weights_only=True)["random"]
    assert len(random) == 2
    assert not torch.equal(random[0]["torch"], random[1]["torch"])


def test_a_run_goes_on_in_another_layout_with_the_same_weights_and_moments(tmp_path: Path) -> None:
    """Adam's moments and step are what decides the next steps: they come to what one uninterrupted process comes to.
    Both kinds of result, in three starts of two ranks: half a run, the other half, and once more."""
    bodies, firsts, seconds = {}, [], []
    for kind in ("lora", "full"):
        (tmp_path / kind).mkdir()
        bodies[kind] = make_job(tmp_path / kind, rows=9, adapter={"type": kind})
        assert train_here(tmp_path / kind / "one", bodies[kind]) == EXIT_FINISHED
    for kind, body in bodies.items():
        for before in ("ddp", "fsdp", "zero2", "zero3", "pipeline"):
            firsts.append(
                Case(tmp_path / kind / f"half-{before}", on_ranks(body, 2, before), stop_rank=0, stop_check=9)
            )
        half = cut_back(tmp_path / kind / "one", tmp_path / kind / "half-none", 4)
        assert step_of(half) == 4
    assert train_on_ranks(tmp_path, 2, firsts) == [[EXIT_STOPPED] * 2] * len(firsts)
    for kind, body in bodies.items():
        for before, after in LAYOUTS:
            path = shutil.copytree(tmp_path / kind / f"half-{before}", tmp_path / kind / f"{before}-{after}")
            if after == "none":
                assert train_here(path, body, attempt=2) == EXIT_FINISHED
            else:
                seconds.append(Case(path, on_ranks(body, 2, after), attempt=2))
    assert train_on_ranks(tmp_path, 2, seconds) == [[EXIT_FINISHED] * 2] * len(seconds)
    for kind in bodies:
        for before, after in LAYOUTS:
            path = tmp_path / kind / f"{before}-{after}"
            assert events_of(path, "started")[-1].data["resumed_from"] > 0
            assert_same_training(path, tmp_path / kind / "one")


def test_the_best_checkpoint_becomes_the_result(tmp_path: Path) -> None:
    """At this rate the second evaluation is worse: the weights of the first are put back, whole, on all ranks."""
    hyper = {"early_stopping": {"patience": 1}, "learning_rate": 1.0}
    bodies, cases = {}, []
    for kind in ("lora", "full"):
        (tmp_path / kind).mkdir()
        bodies[kind] = make_job(tmp_path / kind, rows=9, adapter={"type": kind}, hyper=hyper)
        cases += [
            Case(tmp_path / kind / name, on_ranks(bodies[kind], 2, name))
            for name in ("fsdp", "zero2", "zero3", "pipeline")
        ]
    assert train_on_ranks(tmp_path, 2, cases) == [[EXIT_FINISHED] * 2] * len(cases)
    for case in cases:
        result = "model" if (case.path / "model").exists() else "adapter"
        best, last = (case.path / "checkpoints" / name / result for name in ("step-00000002", "step-00000004"))
        assert same_weights(case.path / result, best)
        assert not same_weights(case.path / result, last)


def cut_back(whole: Path, path: Path, step: int) -> Path:
    """The directory of a run that ended after this step; its newest checkpoint."""
    shutil.copytree(whole, path)
    shutil.rmtree(path / "model", ignore_errors=True)
    shutil.rmtree(path / "adapter", ignore_errors=True)
    for checkpoint in (path / "checkpoints").iterdir():
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)
    return max((path / "checkpoints").iterdir(), key=step_of)
