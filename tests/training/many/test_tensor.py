"""Matrices split among ranks: a run is what one process computes, alone and with ranks that share the rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny import make_config, make_model, make_plan, save_model
from tests.training.many.ranks import Case, assert_same_training, find_difference, train_on_ranks
from tests.training.many.test_equality import PREFERENCES
from tests.training.tiny_runs import (
    curve_of,
    events_of,
    last_event,
    make_job,
    read_json,
    same_weights,
    train_here,
    weights_of,
    without_times,
)
from training.errors import SpecError
from training.rank.data_parallel import local_part
from training.rank.group import Ranks
from training.rank.run import run
from training.rank.stop import Stop
from training.rank.tensor import TensorZero, find_unlike
from training.rank.tensor_cut import cut
from training.rank.tensor_plan import find_sizes
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RunDir, write_json

# The first test waits for all runs of its launch.
pytestmark = pytest.mark.timeout(900)

HYPER = {"n_epochs": "auto", "max_steps": 6, "eval_steps": 3, "save_steps": 3}
WORSENING = {"early_stopping": {"patience": 1}, "learning_rate": 1.0, "eval_steps": 2, "save_steps": 2}
"""At this rate the second evaluation is worse."""
JOBS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"type": "full"}},
    "lora": {},
    "full, tied": {"adapter": {"type": "full"}, "tied": True},
    "full, norms of heads": {"adapter": {"type": "full"}, "family": "qwen3"},
    "full, experts": {"adapter": {"type": "full"}, "family": "mixtral", "hyper": {"learning_rate": 1e-3}},
    "lora, fused matrices": {"family": "phi3", "hyper": {"learning_rate": 1e-3}},
    "lora, checkpointed": {"gradient_checkpointing": True},
    "lora, packed": {"hyper": {"packing": True, "max_seq_len": 64}},
    "lora, head trained": {"adapter": {"modules_to_save": ["lm_head"]}},
    "lora on the head": {"adapter": {"target_modules": ["lm_head", "q_proj", "down_proj"]}},
    "prompt": {"adapter": {"type": "prompt"}},
    "dpo": {"method": "dpo"},
    "kto": {"method": "kto"},
    "lora with dropout": {"adapter": {"dropout": 0.3}},
    "full, best": {"adapter": {"type": "full"}, "hyper": WORSENING},
    "full, fp16": {"adapter": {"type": "full"}, "precision": "fp16", "hyper": {"learning_rate": 1e-3}},
}
ALONE = {"lora with dropout", "full, best", "full, fp16"}
"""Not to be compared number by number."""
PAIR = {"data": 1, "tensor": 2}
SQUARE, SQUARE_ZERO = {"strategy": "ddp", "data": 2, "tensor": 2}, {"strategy": "zero1", "data": 2, "tensor": 2}
CASES = [
    *(("pair", job) for job in JOBS if job not in {*ALONE, "kto"}),
    ("square", "kto"),
    *(("square, zero", job) for job in ("full", "lora")),
]
LAYOUTS = {
    "pair": PAIR,
    "square": SQUARE,
    "square, zero": SQUARE_ZERO,
    "ddp": {"strategy": "ddp", "data": 2},
}
STOPPED = [("pair", "lora with dropout"), ("pair", "full"), ("square, zero", "full")]
MOVED = [
    ("pair", "ddp", "full"),
    ("ddp", "pair", "lora"),
    ("ddp", "square, zero", "full"),
    ("square, zero", "pair", "full"),
]
"""Where a run is stopped, and where it goes on."""


def ranks_of(layout: str) -> int:
    asked = LAYOUTS[layout]
    return int(asked["data"]) * int(asked.get("tensor", 1))


class Runs:
    """All runs of this module, in three starts: on two ranks, on four, and what goes on elsewhere on two again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bodies = {job: self._make(job) for job in JOBS}
        self.codes: dict[Path, list[int]] = {}
        for ranks in (2, 4):
            cases = [self._case(layout, job) for layout, job in CASES if ranks_of(layout) == ranks]
            if ranks == 2:
                cases += [self._case("pair", job) for job in sorted(ALONE)]
            for layout, job in STOPPED:
                if ranks_of(layout) == ranks:
                    again = self.path(layout, job, "again")
                    cases += [self._case(layout, job, again, stop_rank=1, stop_check=9)]
                    cases += [self._case(layout, job, again, attempt=2)]
            for before, after, job in MOVED:
                if ranks_of(before) == ranks:
                    cases += [self._case(before, job, self.path(before, job, after), stop_rank=0, stop_check=9)]
            self._run(ranks, [*cases, *self._list_moved(ranks)] if ranks == 4 else cases)
        self._run(2, self._list_moved(2))

    def one(self, job: str) -> Path:
        path = self.folder / job / "one"
        if not path.exists():
            assert train_here(path, self.bodies[job]) == EXIT_FINISHED
        return path

    def path(self, layout: str, job: str, which: str = "") -> Path:
        return self.folder / job / f"{layout}-{which}"

    def _case(self, layout: str, job: str, path: Path | None = None, **more: Any) -> Case:
        body = {**self.bodies[job], "parallelism": LAYOUTS[layout]}
        return Case(path or self.path(layout, job), body, **more)

    def _list_moved(self, ranks: int) -> list[Case]:
        moved = [(before, after, job) for before, after, job in MOVED if ranks_of(after) == ranks]
        return [self._case(after, job, self.path(before, job, after), attempt=2) for before, after, job in moved]

    def _make(self, job: str) -> dict[str, Any]:
        (self.folder / job).mkdir()
        if "16" in job:
            save_model(self.folder / job / "base", dtype=torch.bfloat16)
        asked = JOBS[job]
        return make_job(self.folder / job, rows=9, **{**asked, "hyper": {**HYPER, **asked.get("hyper", {})}})

    def _run(self, ranks: int, cases: list[Case]) -> None:
        for case, codes in zip(cases, train_on_ranks(self.folder, ranks, cases), strict=True):
            want = EXIT_FINISHED if case.stop_rank is None else EXIT_STOPPED
            assert codes == [want] * ranks, (case.path, last_event(case.path))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("tensor"))


@pytest.mark.parametrize(("layout", "job"), CASES)
def test_split_matrices_compute_what_one_process_computes(layout: str, job: str, runs: Runs) -> None:
    """6 steps: losses, norms, rates and evaluations of each, FLOPs, and the weights and all files of the result."""
    many, one, asked = runs.path(layout, job), runs.one(job), LAYOUTS[layout]
    plan = read_json(many / "plan.json")
    assert (plan["ranks"], plan["data"], plan["tensor"]) == (ranks_of(layout), asked["data"], 2)
    assert_same_training(many, one, apart=PREFERENCES if job in ("dpo", "kto") else {})
    if layout == "pair":
        assert [event.data["flops"] for event in events_of(many, "metrics")] == [
            pytest.approx(event.data["flops"]) for event in events_of(one, "metrics")
        ]


def test_work_is_shared_and_measured_against_the_peak_of_all(runs: Runs) -> None:
    plan = read_json(runs.path("pair", "full") / "plan.json")
    told = [event.data for event in events_of(runs.path("pair", "full"), "metrics")]
    peak = plan["compute"]["peak_flops_per_s"]
    first = told[0]
    assert first["mfu"] == pytest.approx(first["flops"] / (2 * peak * first["step_s"]))
    model = make_model()
    norms = sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    matrices = sum(weight.numel() for weight in model.parameters()) - norms
    assert plan["memory"]["weights_bytes"] == 4 * (norms + matrices // 2)


@pytest.mark.parametrize(("layout", "job"), STOPPED)
def test_a_stopped_run_goes_on_with_the_same_bits(layout: str, job: str, runs: Runs) -> None:
    whole, again = runs.path(layout, job), runs.path(layout, job, "again")
    (told,) = events_of(again, "stopped")
    assert 0 < told.step < 6
    assert events_of(again, "started")[1].data["resumed_from"] == told.step
    assert curve_of(again) == curve_of(whole)
    result = "model" if (whole / "model").exists() else "adapter"
    assert same_weights(again / result, whole / result)
    assert without_times(last_event(again).data) == without_times(last_event(whole).data)


@pytest.mark.parametrize(("before", "after", "job"), MOVED)
def test_a_run_goes_on_in_another_layout_as_if_uninterrupted(before: str, after: str, job: str, runs: Runs) -> None:
    path = runs.path(before, job, after)
    assert events_of(path, "started")[-1].data["resumed_from"] > 0
    assert_same_training(path, runs.one(job))


def test_ranks_with_the_same_rows_have_the_same_random_numbers(runs: Runs) -> None:
    """One state for each that has rows of its own: what is whole on several ranks is dropped alike on them."""

    def count(layout: str, job: str) -> int:
        state = runs.path(layout, job) / "checkpoints" / "step-00000003" / "state.pt"
        return len(torch.load(state, weights_only=True)["random"])

    assert (count("pair", "lora with dropout"), count("square", "kto")) == (1, 2)


def test_the_best_checkpoint_becomes_the_result(runs: Runs) -> None:
    """Its weights are put back, whole, on both ranks."""
    path = runs.path("pair", "full, best")
    assert last_event(path).data["best_step"] == 2
    best, last = (path / "checkpoints" / name / "model" for name in ("step-00000002", "step-00000004"))
    assert same_weights(path / "model", best)
    assert not same_weights(path / "model", last)


def test_in_16_bits_split_matrices_compute_the_same_but_for_rounding(runs: Runs) -> None:
    many, one = runs.path("pair", "full, fp16"), runs.one("full, fp16")
    got, want = ([event.data for event in events_of(path, "metrics")] for path in (many, one))
    assert len(got) == len(want) == 6
    for ours, theirs in zip(got, want, strict=True):
        for name in ("train_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=0.01)
        assert ours["loss_scale"] == theirs["loss_scale"]
    assert {weight.dtype for weight in weights_of(many / "model").values()} == {torch.bfloat16}
    assert find_difference(many / "model", one / "model") < 1e-2


@pytest.mark.parametrize(
    ("family", "said"), [("gpt2", "no plan for how to split the layers of gpt2"), ("llama", "by 4; 2 would do")]
)
def test_a_family_without_a_plan_and_heads_that_do_not_divide_are_refused(
    family: str, said: str, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    write_json(run_dir.spec, {**make_job(tmp_path, family=family), "parallelism": {"tensor": 4}})
    assert run(run_dir, 1, Stop(run_dir), plan_only=True) == EXIT_FAILED
    failed = last_event(run_dir.path).data
    assert failed["param"] == "parallelism.tensor"
    assert said in failed["message"]


def test_a_tied_head_that_is_trained_whole_beside_an_adapter_is_refused() -> None:
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True)
    model = get_peft_model(make_model(tied=True), adapter)
    with pytest.raises(SpecError, match='"fsdp" trains it') as refused:
        cut(model, None, torch.device("cpu"))  # type: ignore[arg-type]  # before it meets others
    assert refused.value.param == "adapter.modules_to_save"


@pytest.mark.parametrize(
    ("family", "units"),
    [("llama", 2), ("qwen3", 2), ("phi3", 32), ("mixtral", 2), ("deepseek_v3", 16), ("gpt2", 1), ("gpt_oss", 1)],
)
def test_a_model_is_split_by_its_heads_and_widths(family: str, units: int) -> None:
    """All have 2 heads of keys: Phi-3's matrices are put together before its heads, DeepSeek's experts are 16 wide."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(make_config(family))
    assert find_sizes(model)[0] == units


def test_gradients_that_ranks_do_not_share_are_found() -> None:
    same = {"norm": 2.0, "unused": 0.0, "rounded": 1.0}
    assert find_unlike([same, {**same, "rounded": 1.0 + 1e-6}]) == []
    assert find_unlike([same, {**same, "norm": 2.1}]) == ["norm"]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_each_rank_keeps_a_part_of_every_matrix_and_of_all_moments() -> None:
    """One of four ranks by itself, two by two; nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)  # type: ignore[no-untyped-call]
    try:
        plan = make_plan(ranks=4, data=2, tensor=2, strategy="zero1")
        parallel = TensorZero(make_model(), plan, Ranks())
    finally:
        dist.destroy_process_group()
    model = make_model()
    norms = sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    matrices = sum(weight.numel() for weight in model.parameters()) - norms
    kept = sum(local_part(weight).numel() for weight in parallel.model.parameters())
    stepped = sum(weight.numel() for group in parallel._optimizer.param_groups for weight in group["params"])
    assert kept == norms + matrices // 2
    assert stepped == pytest.approx(kept / 2, rel=0.02)


def test_norms_alone_are_whole_on_all_ranks() -> None:
    model = make_model()
    norms = sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    assert find_sizes(model)[1] == norms
