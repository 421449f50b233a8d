"""What waits in the host's memory, and what a DeepSpeed config sets, changes no number: in one start of two ranks whole
runs, one whose gradient is dropped, and runs that are stopped and go on, each against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.many.ranks import (
    WEIGHTS,
    Case,
    assert_same_training,
    find_difference,
    on_ranks,
    start_ranks,
    train_on_ranks,
)
from tests.training.many.test_going_on import cut_back
from tests.training.many.test_written import BAD_STEP, make_spoilt
from tests.training.tiny_runs import curve_of, events_of, make_job, read_json, same_weights, train_here
from training.rundir import EXIT_FINISHED, EXIT_STOPPED

# The first test waits for all runs.
pytestmark = pytest.mark.timeout(900)

JOBS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"type": "full"}},
    "lora": {},
    "experts": {"adapter": {"type": "full"}, "family": "mixtral"},
    "kto": {"method": "kto"},
    "qlora": {"adapter": {"type": "qlora"}},
}
OFFLOADED = [
    ("zero1", "optimizer", "full"),
    ("zero2", "optimizer", "lora"),
    ("zero2", "optimizer", "experts"),
    ("zero3", "optimizer", "full"),
    ("zero3", "params", "lora"),
    ("zero3", "params", "qlora"),
    ("fsdp", "params", "full"),
    ("fsdp", "params", "lora"),
    ("fsdp", "params", "qlora"),
]
EXCHANGED_2 = {
    **{"reduce_bucket_size": 1e3, "allgather_bucket_size": 1000, "overlap_comm": True, "reduce_scatter": False},
    **{"use_multi_rank_bucket_allreduce": True, "parameter_alignment": True},
}
EXCHANGED_3 = {
    **{"reduce_bucket_size": 1000, "overlap_comm": True, "contiguous_gradients": False, "sub_group_size": 2000},
    **{"stage3_prefetch_bucket_size": 5000, "stage3_max_reuse_distance": 5000, "stage3_max_live_parameters": 10_000},
    **{"stage3_param_persistence_threshold": 100, "stage3_model_persistence_threshold": 500},
    "stage3_use_all_reduce_for_fetch_params": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "buckets": {"zero_optimization": EXCHANGED_2, "wall_clock_breakdown": True, "dump_state": True},
    "contiguous": {"zero_optimization": {"contiguous_gradients": False}},
    "prefetching": {"zero_optimization": EXCHANGED_3, "comms_logger": {"enabled": True, "verbose": True}},
    "one by one": {"zero_optimization": {"stage3_allgather_sequential": True, "reduce_scatter": False}},
}
CONFIGURED = [
    ("zero1", "buckets", "full"),
    ("zero2", "buckets", "lora"),
    ("zero2", "contiguous", "full"),
    ("zero3", "prefetching", "kto"),
    ("zero3", "one by one", "lora"),
]
SPOILT = [("zero2", "optimizer"), ("zero3", "optimizer")]
GOING_ON = [("zero2", "optimizer"), ("zero3", "params"), ("fsdp", "params")]
LIMITS = {prefix + name: 1e-5 for name in ("kl", "train_loss", "eval_loss") for prefix in ("", "eval_")}
LIMITS |= {prefix + f"reward{name}": 1e-5 for name in ("s_chosen", "s_rejected", "_margin") for prefix in ("", "eval_")}
"""As in test_equality.py: what rounding leaves of small differences of log-probabilities."""


def offload(body: dict[str, Any], strategy: str, what: str) -> dict[str, Any]:
    return {**body, "parallelism": {"strategy": strategy, "data": 2, "offload": what}}


class Made:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bodies = {}
        for job, asked in JOBS.items():
            (folder / job).mkdir()
            bodies[job] = make_job(folder / job, rows=9, **asked)
            assert train_here(folder / job / "one", bodies[job]) == EXIT_FINISHED
        cases: list[tuple[Case, int]] = []
        for strategy, what, job in OFFLOADED:
            cases.append((Case(self.path(job, strategy, what), offload(bodies[job], strategy, what)), EXIT_FINISHED))
        for strategy, name, job in CONFIGURED:
            body = {**on_ranks(bodies[job], 2, strategy), "deepspeed": CONFIGS[name]}
            cases.append((Case(self.path(job, strategy, name), body), EXIT_FINISHED))
        (folder / "spoilt").mkdir()
        spoilt, self.bad_line = make_spoilt(folder / "spoilt", on_nan="skip")
        assert train_here(folder / "spoilt" / "one", spoilt) == EXIT_FINISHED
        for strategy, what in SPOILT:
            path = self.path("spoilt", strategy, what)
            cases.append((Case(path, offload(spoilt, strategy, what)), EXIT_FINISHED))
        for strategy, what in GOING_ON:
            body, again = offload(bodies["lora"], strategy, what), self.path("lora", strategy, f"{what}-again")
            cases.append((Case(again, body, stop_rank=1, stop_check=9), EXIT_STOPPED))
            cases.append((Case(again, body, attempt=2), EXIT_FINISHED))
            there = self.path("lora", strategy, f"{what}-from")
            cut_back(folder / "lora" / "one", there, 4)
            cases.append((Case(there, body, attempt=2), EXIT_FINISHED))
        self.alone = bodies["lora"]
        codes = train_on_ranks(folder, 2, [case for case, _ in cases])
        assert codes == [[code] * 2 for _, code in cases]

    def path(self, job: str, strategy: str, option: str) -> Path:
        return self.folder / job / f"{strategy}-{option}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize(("strategy", "what", "job"), OFFLOADED)
def test_what_waits_on_the_host_is_trained_to_the_same_numbers(strategy: str, what: str, job: str, made: Made) -> None:
    path = made.path(job, strategy, what)
    plan = read_json(path / "plan.json")
    assert (plan["strategy"], plan["offload"]) == (strategy, what)
    assert_same_training(path, made.folder / job / "one", apart=LIMITS if job == "kto" else {})


def test_each_rank_holds_its_part_of_weights_in_4_bits_and_no_more(made: Made) -> None:
    """Before a step and after it; those of a layer that is computed are whole meanwhile."""
    runs = [made.path("qlora", strategy, "params") for strategy in ("zero3", "fsdp")]
    start_ranks(2, Path(__file__).with_name("count_held.py"), *runs)
    for run in runs:
        for rank in range(2):
            whole, before, after = read_json(run / f"held-{rank}")
            assert 2 * before == 2 * after == whole > 0


@pytest.mark.parametrize(("strategy", "what"), SPOILT)
def test_a_dropped_gradient_is_forgotten_on_the_host_too(strategy: str, what: str, made: Made) -> None:
    path, one = made.path("spoilt", strategy, what), made.folder / "spoilt" / "one"
    (told,) = events_of(path, "warning")
    assert (told.step, told.data["lines"]) == (BAD_STEP, [made.bad_line])
    assert find_difference(path / "adapter", one / "adapter") <= WEIGHTS


@pytest.mark.parametrize(("strategy", "what"), GOING_ON)
def test_a_stopped_run_goes_on_from_the_host_with_the_same_bits(strategy: str, what: str, made: Made) -> None:
    whole, again = made.path("lora", strategy, what), made.path("lora", strategy, f"{what}-again")
    assert events_of(again, "started")[1].data["resumed_from"] > 0
    assert curve_of(again) == curve_of(whole)
    assert same_weights(again / "adapter", whole / "adapter")


@pytest.mark.parametrize(("strategy", "what"), GOING_ON)
def test_moments_go_from_the_host_to_one_process_and_back(strategy: str, what: str, made: Made) -> None:
    whole, there = made.path("lora", strategy, what), made.path("lora", strategy, f"{what}-from")
    back = made.path("lora", strategy, f"{what}-back")
    cut_back(whole, back, 4)
    assert train_here(back, made.alone, attempt=2) == EXIT_FINISHED
    for path in (there, back):
        assert events_of(path, "started")[-1].data["resumed_from"] == 4
        assert_same_training(path, made.folder / "lora" / "one")


@pytest.mark.parametrize(("strategy", "name", "job"), CONFIGURED)
def test_a_deepspeed_config_changes_no_number(strategy: str, name: str, job: str, made: Made) -> None:
    """Nor under which weight's name a checkpoint holds which moments."""
    path, one = made.path(job, strategy, name), made.folder / job / "one"
    assert read_json(path / "plan.json")["deepspeed"]["zero_optimization"]
    assert_same_training(path, one, apart=LIMITS if job == "kto" else {})
    got, want = (read_moments(run) for run in (path, one))
    assert got.keys() == want.keys()
    for weight, moments in want.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            largest = float(moments[kind].abs().max())
            assert float((got[weight][kind] - moments[kind]).abs().max()) <= 1e-3 * largest + 1e-9, (weight, kind)


def read_moments(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    state = torch.load(path / "checkpoints" / "step-00000006" / "state.pt", weights_only=True)
    moments: dict[str, dict[str, torch.Tensor]] = state["optimizer"]["state"]
    return moments
