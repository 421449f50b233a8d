"""Ranks that have some of the layers each compute what one process computes. Nine rows in windows of four, or of five:
a last window of one row has fewer passes than there are ranks."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.tiny import make_config, make_tokenizer
from tests.training.many.ranks import (
    Case,
    assert_same_digits,
    assert_same_training,
    assert_whole_checkpoints,
    name_result,
    train_on_ranks,
)
from tests.training.many.test_ends import start
from tests.training.tiny_runs import (
    events_of,
    in_double,
    last_event,
    make_job,
    read_json,
    train_here,
    weights_of,
)
from training.rundir import EXIT_FAILED, EXIT_FINISHED

# The first test of a launch waits for all runs of it.
pytestmark = pytest.mark.timeout(600)

HYPER = {"n_epochs": "auto", "max_steps": 8, "eval_steps": 4, "save_steps": 4}
FULL = {"adapter": {"type": "full"}}
JOBS: dict[str, dict[str, Any]] = {
    "full": {**FULL},
    "full, tied": {**FULL, "tied": True},
    "full, two rows a pass": {**FULL, "hyper": {"micro_batch_size": 2, "weight_decay": 0.1}},
    "full, experts": {**FULL, "family": "mixtral"},
    "full, Adafactor": {**FULL, "hyper": {"optimizer": "adafactor"}},
    "full, four layers": {**FULL, "layers": 4, "tied": True},
    "full, five rows a step": {**FULL, "layers": 4, "hyper": {"batch_size": 5}},
    "lora": {},
    "lora, packed": {"hyper": {"packing": True, "max_seq_len": 64}},
    "lora, as many rows a pass as fit": {"hyper": {"micro_batch_size": "auto"}},
    "lora, checkpointed": {"layers": 4, "gradient_checkpointing": True},
    "lora, logits squashed": {"family": "gemma2", "attention": "eager"},
    "lora, experts": {"family": "mixtral"},
    "dora": {"adapter": {"use_dora": True}},
    "ia3": {"adapter": {"type": "ia3"}},
    "pretrain": {"method": "pretrain", "hyper": {"max_seq_len": 16}},
    "full, bf16": {**FULL, "precision": "bf16"},
    "lora, bf16": {"precision": "bf16"},
    "full, fp16": {**FULL, "precision": "fp16"},
}
SIXTEEN_BITS = [job for job in JOBS if "16" in job]
FOUR_LAYERS = ("full, four layers", "full, five rows a step", "lora, checkpointed")
CASES = [
    *((1, "1f1b", job) for job in JOBS if job not in SIXTEEN_BITS),
    *((1, "interleaved", job) for job in FOUR_LAYERS),
    *((2, "1f1b", job) for job in ("full, tied", "full, experts", "lora")),
    (2, "interleaved", "full, four layers"),
]
"""How many copies of a pipeline of two ranks, its schedule, and what is trained."""
DOUBLE = [(1, "1f1b", "full, tied"), (2, "interleaved", "lora, checkpointed")]
"""In 32 bits Adam makes 8e-4 of what rounding leaves of a gradient in the second, with DDP too."""


def in_pipeline(body: dict[str, Any], data: int = 1, schedule: str = "1f1b", ranks: int = 2) -> dict[str, Any]:
    return {**body, "parallelism": {"data": data, "pipeline": ranks, "schedule": schedule}}


def save_layers(folder: Path, layers: int, *, tied: bool = False) -> None:
    torch.manual_seed(0)
    config = make_config(tied=tied)
    config.num_hidden_layers = layers
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


class Runs:
    """Of each job one run in this process, and one on each layout, all of a number of ranks in one start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies = {job: self._make(job) for job in JOBS}
        self.started: set[int] = set()

    def one(self, job: str, *, double: bool = False) -> Path:
        path = self._path(0, "one", job, double=double)
        if not path.exists():
            with in_double() if double else nullcontext():
                assert train_here(path, self.bodies[job]) == EXIT_FINISHED
        return path

    def many(self, data: int, schedule: str, job: str, *, double: bool = False) -> Path:
        if data not in self.started:
            self.started.add(data)
            cases = [
                Case(self._path(data, kind, other), in_pipeline(self.bodies[other], data, kind))
                for copies, kind, other in [*CASES, *((1, "1f1b", other) for other in SIXTEEN_BITS)]
                if copies == data
            ]
            cases += [
                Case(self._path(data, kind, big, double=True), in_pipeline(self.bodies[big], data, kind), double=True)
                for copies, kind, big in DOUBLE
                if copies == data
            ]
            ranks = 2 * data
            assert train_on_ranks(self.folder, ranks, cases) == [[EXIT_FINISHED] * ranks] * len(cases)
        return self._path(data, schedule, job, double=double)

    def _path(self, data: int, schedule: str, job: str, *, double: bool = False) -> Path:
        return self.folder / job / f"{schedule}-{data}{'-double' if double else ''}"

    def _make(self, job: str) -> dict[str, Any]:
        folder, asked = self.folder / job, dict(JOBS[job])
        folder.mkdir()
        if layers := asked.pop("layers", None):
            save_layers(folder / "base", layers, tied=asked.get("tied", False))
        return make_job(folder, rows=9, **{**asked, "hyper": {**HYPER, **asked.get("hyper", {})}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("data", "schedule", "job"), CASES)
def test_a_pipeline_computes_what_one_process_computes(data: int, schedule: str, job: str, runs: Runs) -> None:
    """Losses, norms, rates and evaluations of each step, and the weights and all files of the result."""
    many, one = runs.many(data, schedule, job), runs.one(job)
    plan = read_json(many / "plan.json")
    assert (plan["ranks"], plan["data"], plan["pipeline"], plan["schedule"]) == (2 * data, data, 2, schedule)
    assert_same_training(many, one)
    assert_whole_checkpoints(many, one, (4, 8))


@pytest.mark.parametrize(("data", "schedule", "job"), DOUBLE)
def test_in_64_bits_a_pipeline_computes_the_same_to_the_last_digits(
    data: int, schedule: str, job: str, runs: Runs
) -> None:
    assert_same_digits(runs.many(data, schedule, job, double=True), runs.one(job, double=True))


@pytest.mark.parametrize("job", SIXTEEN_BITS)
def test_in_16_bits_a_pipeline_computes_the_same_but_for_rounding(job: str, runs: Runs) -> None:
    many, one = runs.many(1, "1f1b", job), runs.one(job)
    got, want = ([event.data for event in events_of(path, "metrics")] for path in (many, one))
    assert len(got) == len(want)
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True), 1):
        limit = 1e-3 if step == 1 else 0.05
        for name in ("train_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=limit), (step, name)
        assert theirs.get("loss_scale") == ours.get("loss_scale")
    result = name_result(one)
    assert {name: (weight.shape, weight.dtype) for name, weight in weights_of(many / result).items()} == {
        name: (weight.shape, weight.dtype) for name, weight in weights_of(one / result).items()
    }


def test_work_is_that_of_all_ranks(runs: Runs) -> None:
    """No pass is made in vain, and nothing is computed for what shorter passes are filled up with."""
    got, want = (
        [event.data["flops"] for event in events_of(path, "metrics")]
        for path in (runs.many(1, "1f1b", "full"), runs.one("full"))
    )
    assert got == want


def test_adapters_that_leave_a_rank_nothing_to_train_are_refused_by_all_ranks(tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter={"target_modules": {"regex": ".*layers.0.*q_proj"}})
    process = start(tmp_path, in_pipeline(body))
    _, said = process.communicate(timeout=300)
    assert process.returncode == EXIT_FAILED
    assert said.startswith("error: parallelism.pipeline: a rank would have nothing to train; ")
    assert said.count("\n") == 1
    assert last_event(tmp_path / "run").data["code"] == "invalid_value"
