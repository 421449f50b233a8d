"""Whatever the strategy and the number of ranks, a run is what one process computes; and that is what a plain loop in
PyTorch computes (test_plain_loop.py). Nine rows in windows of four: the last has one, fewer than there are ranks."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.training.many.ranks import (
    ALL,
    Case,
    assert_same_digits,
    assert_same_training,
    assert_whole_checkpoints,
    name_result,
    on_ranks,
    train_on_ranks,
)
from tests.training.tiny_runs import events_of, in_double, make_job, read_json, train_here, weights_of
from training.rundir import EXIT_FINISHED

# The first test of a launch waits for all runs of it.
pytestmark = pytest.mark.timeout(900)

HYPER = {"n_epochs": "auto", "max_steps": 20, "eval_steps": 5, "save_steps": 10}
JOBS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"type": "full"}},
    "lora": {},
    "full, tied": {"adapter": {"type": "full"}, "tied": True},
    "full, two rows a pass": {"adapter": {"type": "full"}, "hyper": {"micro_batch_size": 2}},
    "full, not clipped": {"adapter": {"type": "full"}, "hyper": {"max_grad_norm": 0}},
    "full, experts": {"adapter": {"type": "full"}, "family": "mixtral"},
    "lora, as many rows a pass as fit": {"hyper": {"micro_batch_size": "auto"}},
    "lora, checkpointed": {"gradient_checkpointing": True},
    "lora, packed": {"hyper": {"packing": True, "max_seq_len": 64}},
    "lora, head and embeddings trained": {"adapter": {"modules_to_save": ["lm_head", "embed_tokens"]}},
    "lora, experts": {"family": "mixtral"},
    "pissa": {"adapter": {"init": "pissa"}},
    "dora": {"adapter": {"use_dora": True}},
    "ia3": {"adapter": {"type": "ia3"}},
    "prompt": {"adapter": {"type": "prompt"}},
    "prefix": {"adapter": {"type": "prefix"}},
    "qlora": {"adapter": {"type": "qlora"}},
    "qlora, dora": {"adapter": {"type": "qlora", "use_dora": True}},
    "qlora, 8 bits": {"adapter": {"type": "qlora", "bits": 8}},
    "pretrain": {"method": "pretrain", "hyper": {"max_seq_len": 16}},
    "dpo": {"method": "dpo"},
    "kto": {"method": "kto"},
    "full, bf16": {"adapter": {"type": "full"}, "precision": "bf16"},
    "lora, bf16": {"precision": "bf16"},
    "qlora, bf16": {"adapter": {"type": "qlora"}, "precision": "bf16"},
    "full, fp16": {"adapter": {"type": "full"}, "precision": "fp16"},
}
SIXTEEN_BITS = [
    ("zero2", "full, bf16"),
    ("zero3", "qlora, bf16"),
    ("zero3", "full, fp16"),
    *(
        [
            ("zero3", "full, bf16"),
            ("zero3", "lora, bf16"),
            ("fsdp", "qlora, bf16"),
            ("zero2", "full, fp16"),
        ]
        if ALL
        else []
    ),
]
"""Numbers of step 1, and what rounding to 8 bits of mantissa leaves of those after it."""
FOUR = ("full", "lora", "kto")
ZERO = {
    "zero1": ("full", "lora", "full, not clipped", "qlora"),
    "zero2": (
        "full",
        "lora",
        "full, tied",
        "full, experts",
        "lora, experts",
        "lora, head and embeddings trained",
        "dora",
        "pissa",
        "dpo",
        "qlora",
        "qlora, 8 bits",
    ),
    "zero3": ("full", "lora", "full, tied", "full, experts", "lora, checkpointed", "dpo", "kto", "qlora"),
}
ONE_DEVICE_ONLY = {"fsdp": ("prompt", "prefix", "qlora, 8 bits")}
CASES = [
    *(
        (strategy, 2, job)
        for strategy in ("ddp", "fsdp")
        for job in JOBS
        if "16" not in job and job not in ONE_DEVICE_ONLY.get(strategy, ())
    ),
    *((strategy, 4, job) for strategy in ("ddp", "fsdp") for job in FOUR),
    *((strategy, 2, job) for strategy, jobs in ZERO.items() for job in jobs),
]
FEW = {
    "ddp": ("full", "lora, as many rows a pass as fit", "lora, experts", "prefix", "qlora, 8 bits", "dpo"),
    "fsdp": ("full", "full, tied", "full, experts", "lora", "lora, packed", "pissa", "qlora", "kto"),
    "zero1": ("full", "full, not clipped"),
    "zero2": ("full, tied", "dora", "lora, head and embeddings trained", "dpo"),
    "zero3": ("full", "lora, checkpointed", "full, experts", "qlora", "kto"),
}
"""All strategies, each with the jobs that ask most of it."""
if not ALL:
    CASES = [case for case in CASES if case[2] in FEW[case[0]] and (case[1] == 2 or case[0] == "fsdp")]
DOUBLE = [("ddp", "full"), ("ddp", "lora"), ("fsdp", "full"), ("fsdp", "lora")]
"""Those that do without DeepSpeed, which sums and steps in fp32."""
REWARDS = ("rewards_chosen", "rewards_rejected", "reward_margin", "kl", "train_loss", "eval_loss")
PREFERENCES = {prefix + name: 1e-5 for name in REWARDS for prefix in ("", "eval_")}
"""Small differences of log-probabilities, which are numbers of about 100: what rounding leaves of them."""


class Runs:
    """Of each job one run in this process, and one on each number of ranks, started when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies = {job: self._make(job) for job in JOBS}
        self.started: set[tuple[str, ...]] = set()

    def one(self, job: str, *, double: bool = False) -> Path:
        path = self._path("one", 1, job, double=double)
        if not path.exists():
            with in_double() if double else nullcontext():
                assert train_here(path, self.bodies[job]) == EXIT_FINISHED
        return path

    def many(self, strategy: str, ranks: int, job: str, *, double: bool = False) -> Path:
        together = tuple(ZERO) if strategy in ZERO else (strategy,)  # DeepSpeed takes long to start
        if (*together, str(ranks)) not in self.started:
            self.started.add((*together, str(ranks)))
            cases = [
                Case(self._path(other, many, job), on_ranks(self.bodies[job], many, other))
                for other, many, job in [*CASES, *((strategy, 2, job) for strategy, job in SIXTEEN_BITS)]
                if other in together and many == ranks
            ]
            cases += [
                Case(self._path(other, 2, job, double=True), on_ranks(self.bodies[job], 2, other), double=True)
                for other, job in DOUBLE
                if other in together and ranks == 2
            ]
            assert train_on_ranks(self.folder, ranks, cases) == [[EXIT_FINISHED] * ranks] * len(cases)
        return self._path(strategy, ranks, job, double=double)

    def _path(self, strategy: str, ranks: int, job: str, *, double: bool = False) -> Path:
        return self.folder / job / f"{strategy}-{ranks}{'-double' if double else ''}"

    def _make(self, job: str) -> dict[str, Any]:
        folder, asked = self.folder / job, dict(JOBS[job])
        folder.mkdir()
        return make_job(folder, rows=9, **{**asked, "hyper": {**HYPER, **asked.get("hyper", {})}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("strategy", "ranks", "job"), CASES)
def test_ranks_compute_what_one_process_computes(strategy: str, ranks: int, job: str, runs: Runs) -> None:
    """20 steps: losses, norms, rates and evaluations of each, and the weights and all files of the result."""
    limits: Mapping[str, float] = PREFERENCES if job in ("dpo", "kto") else {}
    many, one = runs.many(strategy, ranks, job), runs.one(job)
    plan = read_json(many / "plan.json")
    assert (plan["strategy"], plan["ranks"], plan["data"]) == (strategy, ranks, ranks)
    assert_same_training(many, one, apart=limits)
    assert_whole_checkpoints(many, one, (10, 20))


@pytest.mark.parametrize(("strategy", "job"), DOUBLE)
def test_in_64_bits_ranks_compute_the_same_to_the_last_digits(strategy: str, job: str, runs: Runs) -> None:
    """What is left in 32 bits is rounding: nothing is divided, counted or left out otherwise than in one process."""
    assert_same_digits(runs.many(strategy, 2, job, double=True), runs.one(job, double=True))


@pytest.mark.parametrize(("strategy", "job"), SIXTEEN_BITS)
def test_in_16_bits_ranks_compute_the_same_but_for_rounding(strategy: str, job: str, runs: Runs) -> None:
    many, one = runs.many(strategy, 2, job), runs.one(job)
    got, want = ([event.data for event in events_of(path, "metrics")] for path in (many, one))
    assert len(got) == len(want)
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True), 1):
        limit = 1e-3 if step == 1 else 0.05
        for name in ("train_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=limit), (step, name)
        # Each rank's loss is multiplied by their number, for gradients are averaged: fp16 overflows so much earlier.
        assert theirs.get("loss_scale", 1) / ours.get("loss_scale", 1) in (1, 2)
    result = name_result(one)
    assert {name: (weight.shape, weight.dtype) for name, weight in weights_of(many / result).items()} == {
        name: (weight.shape, weight.dtype) for name, weight in weights_of(one / result).items()
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_work_is_that_of_all_ranks_and_the_share_of_the_peak_that_of_each(strategy: str, runs: Runs) -> None:
    """A window of one row is computed by one rank, and by the others in vain: done, and not needed."""
    many, one = runs.many(strategy, 2, "full"), runs.one("full")
    steps = {path: [event.data for event in events_of(path, "metrics")] for path in (many, one)}
    so_far = {path: [0, *(data["flops"] for data in told)] for path, told in steps.items()}
    flops = {path: [after - before for before, after in pairwise(counts)] for path, counts in so_far.items()}
    for step, (got, want) in enumerate(zip(flops[many], flops[one], strict=True), 1):
        assert got == pytest.approx(want if step % 3 else 2 * want), step
    peak = read_json(many / "plan.json")["compute"]["peak_flops_per_s"]
    for step, data in enumerate(steps[many]):
        needed = flops[one][step]
        assert data["mfu"] == pytest.approx(needed / (2 * peak * data["step_s"]))
