"""Experts split among ranks: a run is what one process computes, and goes on in any layout. Nine rows in windows of
four, so that in the last one all ranks but one only lend their experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.training.many.ranks import Case, assert_same_training, train_on_ranks
from tests.training.tiny_runs import make_job, read_json, train_here
from training.rundir import EXIT_FINISHED

pytestmark = pytest.mark.timeout(600)  # the first test of a launch waits for all runs of it

FULL = {"adapter": {"type": "full"}}
JOBS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "lora": {},
    "lora of attention": {"adapter": {"target_modules": ["q_proj", "v_proj"]}},
    "lora of experts alone": {"adapter": {"target_modules": ["gate_up_proj", "down_proj"]}},
    "full, checkpointed": {**FULL, "gradient_checkpointing": True},
    "lora, experts trained whole": {"adapter": {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}},
    "dpo": {"method": "dpo"},
    "qwen2_moe": {**FULL, "family": "qwen2_moe"},
    "qwen2_moe, lora": {"family": "qwen2_moe"},
    "gpt_oss": {**FULL, "family": "gpt_oss"},
}
CASES = [*((2, 2, job) for job in JOBS), *((4, 2, job) for job in ("full", "lora")), (4, 4, "full")]
"""Ranks, of which so many share the experts."""


def split(body: dict[str, Any], ranks: int, expert: int) -> dict[str, Any]:
    return {**body, "parallelism": {"data": ranks, "expert": expert}}


class Runs:
    """Of each job one run in this process, and one on each layout, all of as many ranks in one start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies = {}
        for job, asked in JOBS.items():
            (folder / job).mkdir()
            asked = {"family": "mixtral", **asked}
            self.bodies[job] = make_job(folder / job, rows=9, hyper={"max_steps": 8, "n_epochs": "auto"}, **asked)
        self.started: set[int] = set()

    def one(self, job: str) -> Path:
        path = self.folder / job / "one"
        if not path.exists():
            assert train_here(path, self.bodies[job]) == EXIT_FINISHED
        return path

    def many(self, ranks: int, expert: int, job: str) -> Path:
        if ranks not in self.started:
            self.started.add(ranks)
            cases = [
                Case(self.folder / job / f"{many}-{expert}", split(self.bodies[job], many, expert))
                for many, expert, job in CASES
                if many == ranks
            ]
            assert train_on_ranks(self.folder, ranks, cases) == [[EXIT_FINISHED] * ranks] * len(cases)
        return self.folder / job / f"{ranks}-{expert}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("ranks", "expert", "job"), CASES)
def test_split_experts_compute_what_one_process_computes(ranks: int, expert: int, job: str, runs: Runs) -> None:
    many, one = runs.many(ranks, expert, job), runs.one(job)
    plan = read_json(many / "plan.json")
    assert (plan["strategy"], plan["ranks"], plan["data"], plan["expert"]) == ("ddp", ranks, ranks, expert)
    limits: Mapping[str, float] = {}
    assert_same_training(many, one, apart=limits)
