"""Experts split among ranks: a run is what one process computes, and goes on in any layout. Nine rows in windows of
four: in the last one a single rank has a row, and the others lend their experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_tokenizer, save_model
from tests.training.many.ranks import Case, assert_same_training, train_on_ranks
from tests.training.many.test_equality import PREFERENCES
from tests.training.many.test_going_on import cut_back
from tests.training.tiny_runs import curve_of, events_of, last_event, make_job, read_json, same_weights, train_here
from training.rundir import EXIT_FINISHED, EXIT_STOPPED, checkpoint_name

pytestmark = pytest.mark.timeout(600)  # the first test of a launch waits for all runs of it

FULL = {"adapter": {"type": "full"}}
JOBS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "lora": {},
    "lora of attention": {"adapter": {"target_modules": ["q_proj", "v_proj"]}},
    "lora of experts alone": {"adapter": {"target_modules": ["gate_up_proj", "down_proj"]}},
    "lora, experts trained whole": {"adapter": {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}},
    "full, checkpointed": {**FULL, "gradient_checkpointing": True},
    "lora, two experts for all tokens": {},
    "dpo": {"method": "dpo"},
    "full, qwen2_moe": {**FULL, "family": "qwen2_moe"},
    "lora, qwen2_moe": {"family": "qwen2_moe"},
    "full, gpt_oss": {**FULL, "family": "gpt_oss"},
    "full, bf16": {**FULL, "precision": "bf16"},
    "lora, fp16": {"precision": "fp16"},
}
RESULTS = [("full", "model"), ("lora", "adapter")]
SIXTEEN_BITS = [job for job in JOBS if "16" in job]
ON_FOUR = [(4, 2, "full"), (4, 2, "lora"), (4, 4, "lora, two experts for all tokens")]
CASES = [*((2, 2, job) for job in JOBS if job not in (ON_FOUR[-1][-1], *SIXTEEN_BITS)), *ON_FOUR]
"""Ranks, and among how many of them the experts are split."""
ALL = [*CASES, *((2, 2, job) for job in SIXTEEN_BITS)]


def split(body: dict[str, Any], ranks: int, expert: int) -> dict[str, Any]:
    return {**body, "parallelism": {"data": ranks, "expert": expert}}


class Runs:
    """Of each job one run in this process, and one in each layout, those on as many ranks in one start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies = {job: self._make(job) for job in JOBS}
        self.started: set[int] = set()

    def one(self, job: str) -> Path:
        path = self.path(job, "one")
        if not path.exists():
            assert train_here(path, self.bodies[job]) == EXIT_FINISHED
        return path

    def many(self, ranks: int, expert: int, job: str) -> Path:
        if ranks not in self.started:
            self.started.add(ranks)
            asked = [(expert, job) for many, expert, job in ALL if many == ranks]
            cases = [Case(self.path(job, f"{ranks}-{of}"), split(self.bodies[job], ranks, of)) for of, job in asked]
            codes = [[EXIT_FINISHED] * ranks] * len(cases)
            if ranks == 2:
                cases += self._make_stopped()
                codes += [[EXIT_STOPPED] * 2] * len(RESULTS) + [[EXIT_FINISHED] * 2] * (3 * len(RESULTS) + 1)
            assert train_on_ranks(self.folder, ranks, cases) == codes
        return self.path(job, f"{ranks}-{expert}")

    def path(self, job: str, which: str) -> Path:
        return self.folder / job / which

    def make_earlier(self) -> dict[str, Any]:
        return {**self.bodies["dpo"], "resume_from": str(self.one("lora") / "adapter")}

    def _make_stopped(self) -> list[Case]:
        """Runs that are stopped; those that go on; such as go back to their best checkpoint; one beside an adapter."""
        stopped, others = [], []
        for job, _ in RESULTS:
            body = split(self.bodies[job], 2, 2)
            again, later = self.path(job, "again"), self.path(job, "split later")
            cut_back(self.one(job), later, 4)
            stopped.append(Case(again, body, stop_rank=1, stop_check=9))
            others += [Case(again, body, attempt=2), Case(later, body, attempt=2)]
            hyper = {"early_stopping": {"patience": 1}, "learning_rate": 1.0}
            early = make_job(self.folder / job, family="mixtral", rows=9, hyper=hyper, **JOBS[job])
            others.append(Case(self.path(job, "best"), split(early, 2, 2)))
        return [*stopped, *others, Case(self.path("dpo", "earlier"), split(self.make_earlier(), 2, 2))]

    def _make(self, job: str) -> dict[str, Any]:
        folder = self.folder / job
        folder.mkdir()
        asked = {"family": "mixtral", **JOBS[job]}
        if "two experts" in job:
            favour_two(save_model(folder / "base", "mixtral"))
        return make_job(folder, rows=9, **asked)


def favour_two(base: Path) -> None:
    """A router that likes all experts as well gives each token to the same two."""
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.zeros_(weight)
    model.save_pretrained(base)
    make_tokenizer().save_pretrained(base)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("ranks", "expert", "job"), CASES)
def test_split_experts_compute_what_one_process_computes(ranks: int, expert: int, job: str, runs: Runs) -> None:
    many, one = runs.many(ranks, expert, job), runs.one(job)
    plan = read_json(many / "plan.json")
    assert (plan["strategy"], plan["ranks"], plan["data"], plan["expert"]) == ("ddp", ranks, ranks, expert)
    limits: Mapping[str, float] = PREFERENCES if job == "dpo" else {}
    assert_same_training(many, one, apart=limits)


@pytest.mark.parametrize("job", SIXTEEN_BITS)
def test_in_16_bits_they_compute_the_same_but_for_rounding(job: str, runs: Runs) -> None:
    many, one = (events_of(path, "metrics") for path in (runs.many(2, 2, job), runs.one(job)))
    assert len(many) == len(one)
    for ours, theirs in zip(many, one, strict=True):
        limit = 1e-3 if ours.step == 1 else 0.05
        assert ours.data["train_loss"] == pytest.approx(theirs.data["train_loss"], rel=limit)
        assert ours.data["grad_norm"] == pytest.approx(theirs.data["grad_norm"], rel=2 * limit)


@pytest.mark.parametrize(("job", "result"), RESULTS)
def test_a_run_goes_on_in_any_layout(job: str, result: str, runs: Runs, tmp_path: Path) -> None:
    """Split as before it ends with the same bits. From one process to split experts, and back, it begins with the same
    weights and moments."""
    whole, one = runs.many(2, 2, job), runs.one(job)
    again, split_later, joined = (runs.path(job, name) for name in ("again", "split later", "joined"))
    assert 0 < events_of(again, "started")[1].data["resumed_from"] < 6
    assert curve_of(again) == curve_of(whole)
    assert same_weights(again / result, whole / result)
    cut_back(whole, joined, 4)
    assert train_here(joined, runs.bodies[job], attempt=2) == EXIT_FINISHED
    for path in (split_later, joined):
        assert events_of(path, "started")[-1].data["resumed_from"] == 4
        assert_same_training(path, one)


@pytest.mark.parametrize(("job", "result"), RESULTS)
def test_the_best_checkpoint_of_split_experts_becomes_the_result(job: str, result: str, runs: Runs) -> None:
    """Its whole weights are put back, a part on each rank."""
    runs.many(2, 2, job)
    best = runs.path(job, "best")
    told = last_event(best).data
    lowest, last = (best / "checkpoints" / checkpoint_name(told[step]) / result for step in ("best_step", "steps"))
    assert same_weights(best / result, lowest)
    assert not same_weights(best / result, last)


def test_an_earlier_adapter_is_split_as_the_one_that_is_compared_with_it(runs: Runs) -> None:
    runs.many(2, 2, "dpo")
    assert train_here(runs.path("dpo", "earlier on one"), runs.make_earlier()) == EXIT_FINISHED
    assert_same_training(runs.path("dpo", "earlier"), runs.path("dpo", "earlier on one"), apart=PREFERENCES)
