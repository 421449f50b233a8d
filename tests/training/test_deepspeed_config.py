"""What of a DeepSpeed config may be given, and what is said of the rest."""

import subprocess
import sys
from typing import Any

import pytest
from test_devices import EIGHT, refuse
from test_plan import plan_for

from training.deepspeed_config import OURS, OURS_OF_ZERO, DeepSpeed, ZeroOptimization
from training.errors import SpecError
from training.extending import require_same_run
from training.spec import parse_spec

ZERO = {"resources": {"gpus": 2}, "parallelism": {"strategy": "zero2"}}


def refuse_config(config: Any, strategy: str = "zero2") -> SpecError:
    return refuse(resources={"gpus": 2}, parallelism={"strategy": strategy}, deepspeed=config)


@pytest.mark.parametrize("name", sorted(OURS))
def test_what_other_fields_say_or_what_changes_numbers_is_refused_by_name(name: str) -> None:
    error = refuse_config({name: {}})
    assert (error.param, error.code) == (f"deepspeed.{name}", "invalid_value")
    assert error.message == f"deepspeed.{name}: not to be given here: {OURS[name]}"


@pytest.mark.parametrize("name", sorted(OURS_OF_ZERO))
def test_so_are_the_stage_and_what_goes_to_the_host(name: str) -> None:
    error = refuse_config({"zero_optimization": {name: 1}})
    assert error.param == f"deepspeed.zero_optimization.{name}"
    assert error.message.endswith(OURS_OF_ZERO[name])


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"train_batch_size": 8}, "batch_size"),
        ({"fp16": {"enabled": True}}, "precision"),
        ({"optimizer": {"type": "Adam"}}, "hyperparameters.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "hyperparameters.lr_scheduler"),
        ({"gradient_clipping": 1.0}, "hyperparameters.max_grad_norm"),
        ({"zero_optimization": {"stage": 3}}, "parallelism.strategy"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/"}}}, "parallelism.offload"),
        ({"tensorboard": {"enabled": True, "output_path": "/"}}, "its own directory"),
    ],
)
def test_the_field_that_sets_it_is_named(config: dict[str, Any], field: str) -> None:
    assert field in refuse_config(config).message


@pytest.mark.parametrize(
    ("config", "param", "words"),
    [
        ([], "deepspeed", "not an object"),
        ({"zero_optimization": True}, "deepspeed.zero_optimization", "not an object"),
        ({"zero_optimisation": {}}, "deepspeed.zero_optimisation", 'did you mean "zero_optimization"'),
        (
            {"zero_optimization": {"overlap_com": True}},
            "deepspeed.zero_optimization.overlap_com",
            'did you mean "overlap_comm"',
        ),
        ({"zero_optimization": {"overlap_comm": 1}}, "deepspeed.zero_optimization.overlap_comm", "not true or false"),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            "deepspeed.zero_optimization.reduce_bucket_size",
            "not a whole number of at least 1",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 0.5}},
            "deepspeed.zero_optimization.reduce_bucket_size",
            "not a whole number of at least 1",
        ),
        ({"comms_logger": {"prof_ops": "all"}}, "deepspeed.comms_logger.prof_ops", "not a list of operations"),
        ({"comms_logger": {"enabled": True}}, "deepspeed.comms_logger.verbose", "set it to true"),
        ({"comms_logger": {"verbos": True}}, "deepspeed.comms_logger.verbos", 'did you mean "verbose"'),
    ],
)
def test_what_is_no_setting_is_refused_with_what_is(config: Any, param: str, words: str) -> None:
    error = refuse_config(config)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_strategies_without_deepspeed_take_no_config(strategy: str) -> None:
    gpus = 1 if strategy == "none" else 2
    error = refuse(resources={"gpus": gpus}, parallelism={"strategy": strategy}, deepspeed={})
    assert error.param == "deepspeed"
    assert '"zero1", "zero2" and "zero3"' in error.message


@pytest.mark.parametrize(
    ("strategy", "name", "owner"),
    [("zero2", "stage3_prefetch_bucket_size", '"zero3"'), ("zero3", "allgather_bucket_size", '"zero1" and "zero2"')],
)
def test_a_setting_that_the_stage_does_not_read_is_refused(strategy: str, name: str, owner: str) -> None:
    error = refuse_config({"zero_optimization": {name: 4}}, strategy)
    assert error.param == f"deepspeed.zero_optimization.{name}"
    assert f"belongs to {owner}" in error.message


def test_the_plan_holds_what_was_given_and_no_more() -> None:
    """Numbers also as 5e8. Where lines are asked for, DeepSpeed has to say them; a logger that is off is one as soon as
    DeepSpeed reads of it."""
    given = {"zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": True}, "comms_logger": {"enabled": False}}
    zero = {"reduce_bucket_size": 500_000_000, "overlap_comm": True}
    for more, want in (({}, {}), ({"dump_state": True}, {"dump_state": True, "log_level": "info"})):
        plan = plan_for(hardware=EIGHT, **ZERO, deepspeed={**given, **more})
        assert plan.deepspeed == {"zero_optimization": zero, **want}
    assert plan_for(hardware=EIGHT, **ZERO).deepspeed is None


def test_a_run_may_go_on_with_another_config() -> None:
    body = {"model": "m", "training_file": "f", **ZERO}
    other = parse_spec({**body, "deepspeed": {"zero_optimization": {"overlap_comm": True}}})
    require_same_run(parse_spec(body), other, "here")


def test_all_settings_are_those_of_deepspeed() -> None:
    """Under the names that it reads, and of what is refused by name none is offered."""
    script = "; ".join(
        [
            "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig",
            "print(*(field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()))",
        ]
    )
    known = set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )
    assert set(ZeroOptimization.model_fields) <= known
    assert set(OURS_OF_ZERO) <= known
    assert not set(OURS_OF_ZERO) & set(ZeroOptimization.model_fields)
    assert not set(OURS) & set(DeepSpeed.model_fields)
