"""Experts split among ranks: a run is what one process computes, and goes on in any layout. Nine rows in windows of
four: in the last one a single rank has a row, and the others lend their experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_config, make_tokenizer, save_model
from tests.training.many.ranks import Case, assert_same_training, on_ranks, train_on_ranks
from tests.training.many.test_equality import PREFERENCES
from tests.training.many.test_going_on import cut_back
from tests.training.tiny_runs import curve_of, events_of, last_event, make_job, read_json, same_weights, train_here
from training.adapter import Adapter
from training.rank.adapters import count_trained_experts
from training.rank.experts import count_experts
from training.rundir import EXIT_FINISHED, checkpoint_name, step_of

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
        path = self.folder / job / "one"
        if not path.exists():
            assert train_here(path, self.bodies[job]) == EXIT_FINISHED
        return path

    def many(self, ranks: int, expert: int, job: str) -> Path:
        if ranks not in self.started:
            self.started.add(ranks)
            asked = [(expert, job) for many, expert, job in ALL if many == ranks]
            cases = [Case(self._path(ranks, *case), split(self.bodies[case[1]], ranks, case[0])) for case in asked]
            assert train_on_ranks(self.folder, ranks, cases) == [[EXIT_FINISHED] * ranks] * len(cases)
        return self._path(ranks, expert, job)

    def _path(self, ranks: int, expert: int, job: str) -> Path:
        return self.folder / job / f"{ranks}-{expert}"

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


def test_a_run_goes_on_in_any_layout(runs: Runs, tmp_path: Path) -> None:
    """Split as before it ends with the same bits. From one process to split experts, and from those to one process and
    to whole experts on each rank, it begins with the same weights and moments. The best checkpoint becomes the result:
    whole weights are put back on the ranks. And an earlier adapter is split as the trained one is, that is compared
    with it."""
    cases, bits, others = [], [], []
    for job, result in (("full", "model"), ("lora", "adapter")):
        body, one, whole = runs.bodies[job], runs.one(job), runs.many(2, 2, job)
        split_again, from_one, to_ddp, to_one, best = (tmp_path / f"{job}-{number}" for number in range(5))
        for path, before in ((split_again, whole), (from_one, one), (to_ddp, whole), (to_one, whole)):
            assert step_of(cut_back(before, path, 4)) == 4
        cases += [Case(path, split(body, 2, 2), attempt=2) for path in (split_again, from_one)]
        cases.append(Case(to_ddp, on_ranks(body, 2, "ddp"), attempt=2))
        (tmp_path / job).mkdir()
        stopping = {"early_stopping": {"patience": 1}, "learning_rate": 1.0}
        early = make_job(tmp_path / job, family="mixtral", rows=9, hyper=stopping, **JOBS[job])
        cases.append(Case(best, split(early, 2, 2)))
        assert train_here(to_one, body, attempt=2) == EXIT_FINISHED
        bits.append((split_again, whole, best, result))
        others += [(path, one) for path in (from_one, to_ddp, to_one)]
    earlier = {**runs.bodies["dpo"], "resume_from": str(runs.one("lora") / "adapter")}
    compared = tmp_path / "compared"
    assert train_here(tmp_path / "compared on one", earlier) == EXIT_FINISHED
    cases.append(Case(compared, split(earlier, 2, 2)))
    assert train_on_ranks(tmp_path, 2, cases) == [[EXIT_FINISHED] * 2] * len(cases)
    for path, one in others:
        assert events_of(path, "started")[-1].data["resumed_from"] == 4
        assert_same_training(path, one)
    assert_same_training(compared, tmp_path / "compared on one", apart=PREFERENCES)
    for again, whole, best, result in bits:
        assert curve_of(again) == curve_of(whole)
        assert same_weights(again / result, whole / result)
        told = last_event(best).data
        lowest, last = (best / "checkpoints" / checkpoint_name(told[step]) / result for step in ("best_step", "steps"))
        assert same_weights(best / result, lowest)
        assert not same_weights(best / result, last)


@pytest.mark.parametrize(
    ("family", "experts", "weights", "adapters"),
    [
        ("llama", 0, 0, 0),
        ("mixtral", 4, 2 * 4 * 3 * 32 * 64, 8 * 2 * 4 * ((128 + 32) + (32 + 64))),
        ("qwen3_moe", 4, 2 * 4 * 3 * 32 * 16, 8 * 2 * 4 * ((32 + 32) + (32 + 16))),
        ("gpt_oss", 4, 2 * 4 * (3 * 32 * 64 + 128 + 32), 8 * 2 * 4 * ((128 + 32) + (32 + 64))),
    ],
)
def test_experts_are_counted(family: str, experts: int, weights: int, adapters: int) -> None:
    """Two layers of four experts, each of three matrices, two of which lie in one; adapters of r 8."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(family))
    assert count_experts(model) == (experts, weights)
    assert count_trained_experts(model, Adapter(type="full")) == weights
    assert count_trained_experts(model, Adapter(r=8)) == adapters
    assert count_trained_experts(model, Adapter(target_modules=["q_proj"])) == 0
    assert count_trained_experts(model, Adapter(type="ia3")) == 0
