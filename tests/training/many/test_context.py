"""Ranks that compute pieces of one row come to what one process computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.many.ranks import Case, assert_same_training, on_ranks, train_on_ranks
from tests.training.tiny_runs import make_job, train_here
from training.rank.context import cut_pass
from training.rundir import EXIT_FINISHED

pytestmark = pytest.mark.timeout(600)

HYPER = {"n_epochs": "auto", "max_steps": 20, "eval_steps": 5, "save_steps": 10}
JOBS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"type": "full"}},
    "lora": {},
    "full, tied, several rows a pass": {
        "adapter": {"type": "full"},
        "tied": True,
        "hyper": {"micro_batch_size": "auto"},
    },
    "lora, checkpointed": {"gradient_checkpointing": True},
    "lora, packed": {"hyper": {"packing": True, "max_seq_len": 64}},
    # Gradients of some experts are all but nothing, and Adam makes steps of their rounding.
    "lora, experts": {"family": "mixtral", "hyper": {"learning_rate": 0.001}},
    "pretrain": {"method": "pretrain", "hyper": {"max_seq_len": 15}},
}
LAYOUTS = [
    *(("ddp", 1, 2, job) for job in JOBS),
    ("fsdp", 1, 2, "full"),
    ("fsdp", 1, 2, "lora"),
    ("zero3", 1, 2, "full"),
    ("ddp", 2, 2, "full"),
    ("ddp", 2, 2, "lora, packed"),
    ("ddp", 1, 4, "lora"),
]


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies: dict[str, dict[str, Any]] = {}
        for job, asked in JOBS.items():
            (folder / job).mkdir()
            hyper = {**HYPER, **asked.get("hyper", {})}
            self.bodies[job] = make_job(folder / job, rows=9, **{**asked, "hyper": hyper})
        for ranks in (2, 4):
            cases = [
                Case(self.path(*layout), on_ranks(self.bodies[job], data, strategy, context=context))
                for layout in LAYOUTS
                for strategy, data, context, job in [layout]
                if data * context == ranks
            ]
            assert train_on_ranks(folder, ranks, cases) == [[EXIT_FINISHED] * ranks] * len(cases)

    def path(self, strategy: str, data: int, context: int, job: str) -> Path:
        return self.folder / job / f"{strategy}-{data}-{context}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("strategy", "data", "context", "job"), LAYOUTS)
def test_pieces_of_rows_make_the_run_of_one_process(
    strategy: str, data: int, context: int, job: str, runs: Runs
) -> None:
    """Rows of 13 to 40 tokens on 2 and 4 ranks: of the shortest a rank may have no trained token."""
    one = runs.folder / job / "one"
    if not one.exists():
        assert train_here(one, runs.bodies[job]) == EXIT_FINISHED
    assert_same_training(runs.path(strategy, data, context, job), one)


class FakeRanks:
    members, ranks = None, 4

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_pieces_laid_end_to_end_are_the_pass_with_a_row_that_fills_it_up() -> None:
    ids, positions = torch.arange(10, 20).unsqueeze(0), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
    cut = [cut_pass(ids, positions, FakeRanks(rank)) for rank in range(4)]  # type: ignore[arg-type]
    assert [split.begin for *_, split in cut] == [0, 3, 6, 9]
    assert torch.equal(torch.cat([piece for piece, *_ in cut], 1), torch.tensor([[*range(10, 20), 0, 0]]))
    assert torch.equal(torch.cat([places for _, places, _ in cut], 1)[0, :10], positions[0])
    assert {tuple(split.row_tokens) for *_, split in cut} == {(3, 7, 2)}
