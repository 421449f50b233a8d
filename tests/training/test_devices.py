"""How a job is spread over devices: which mixes are offered, and what is said of the others."""

from typing import Any

import pytest
from test_plan import A100, SMOL, plan_for

from training.devices import Strategy
from training.errors import SpecError
from training.hardware import Hardware
from training.memory import share_states
from training.spec import parse_spec

EIGHT = Hardware(
    gpus=tuple(A100.model_copy(update={"index": index}) for index in range(8)), cpu_cores=64, memory_bytes=2**40
)


def refuse(hyper: dict[str, Any] | None = None, **more: Any) -> SpecError:
    given = {} if hyper is None else {"hyperparameters": hyper}
    with pytest.raises(SpecError) as refused:
        parse_spec({"model": "m", "training_file": "f", **given, **more})
    assert refused.value.message.startswith(refused.value.param or "")
    return refused.value


@pytest.mark.parametrize(
    ("gpus", "asked", "strategy", "ranks"),
    [
        ("auto", {}, "none", 1),
        (1, {}, "none", 1),
        (1, {"strategy": "none"}, "none", 1),
        (4, {}, "ddp", 4),
        (4, {"data": 4}, "ddp", 4),
        (2, {"strategy": "fsdp"}, "fsdp", 2),
        (0, {}, "none", 1),
        (0, {"data": 3}, "ddp", 3),
        ("auto", {"data": 2, "strategy": "fsdp"}, "fsdp", 2),
        (2, {"strategy": "zero1"}, "zero1", 2),
        (2, {"strategy": "zero2"}, "zero2", 2),
        (0, {"data": 2, "strategy": "zero3"}, "zero3", 2),
        (0, {"tensor": 2}, "none", 2),
        (4, {"tensor": 2}, "ddp", 4),
        (8, {"tensor": 2, "strategy": "zero1"}, "zero1", 8),
    ],
)
def test_ranks_are_the_gpus_and_on_the_cpu_what_data_says(
    gpus: int | str, asked: dict[str, Any], strategy: str, ranks: int
) -> None:
    spec = parse_spec({"model": "m", "training_file": "f", "resources": {"gpus": gpus}, "parallelism": asked})
    assert (spec.layout.strategy, spec.layout.ranks) == (strategy, ranks)
    assert spec.layout.data * asked.get("tensor", 1) == ranks


@pytest.mark.parametrize(
    ("gpus", "asked", "param", "words"),
    [
        (4, {"strategy": "none"}, "parallelism.strategy", '"none" is for one device, and there are 4; set "auto"'),
        (1, {"strategy": "ddp"}, "parallelism.strategy", "set resources.gpus to 2 or more"),
        ("auto", {"strategy": "fsdp"}, "parallelism.strategy", "on the CPU parallelism.data"),
        ("auto", {"strategy": "zero2"}, "parallelism.strategy", "on the CPU parallelism.data"),
        (3, {"data": 2}, "parallelism.data", "takes 2 GPUs, and resources.gpus is 3; make them equal"),
        (4, {"data": 1, "tensor": 2}, "parallelism.data", "data 1 x tensor 2 x pipeline 1 takes 2 GPUs"),
        (2, {"tensor": 2, "strategy": "ddp"}, "parallelism.strategy", "set parallelism.data to 2 or more"),
        (8, {"tensor": 2, "strategy": "fsdp"}, "parallelism.strategy", '"ddp" and "zero1" do'),
        (8, {"tensor": 2, "strategy": "zero3"}, "parallelism.strategy", '"ddp" and "zero1" do'),
        (2, {"data": 0}, "parallelism.data", "from 1 to 1024"),
        (2, {"dta": 2}, "parallelism.dta", 'did you mean "data"'),
        (2, {"strategy": "zero9"}, "parallelism.strategy", 'not one of "none", "ddp"'),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(
    gpus: int | str, asked: dict[str, Any], param: str, words: str
) -> None:
    error = refuse(resources={"gpus": gpus}, parallelism=asked)
    assert (error.param, error.code in ("invalid_value", "unknown_field")) == (param, True)
    assert words in error.message


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"adapter": {"type": "qlora"}}, "parallelism.strategy", '"ddp" trains qlora'),
        ({"adapter": {"type": "prompt"}}, "parallelism.strategy", '"ddp" trains it'),
        ({"adapter": {"type": "prefix"}}, "parallelism.strategy", '"ddp" trains it'),
        ({"hyper": {"optimizer": "adafactor"}}, "parallelism.strategy", 'take "adamw", or "ddp"'),
        ({"hyper": {"optimizer": "adamw_8bit"}}, "parallelism.strategy", 'take "adamw", or "ddp"'),
        ({"activation_offloading": True}, "activation_offloading", "leave it out"),
    ],
)
def test_what_is_not_split_is_refused_with_what_works(
    more: dict[str, Any], param: str, words: str, strategy: str
) -> None:
    error = refuse(resources={"gpus": 2}, parallelism={"strategy": strategy}, **more)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"adapter": {"type": "qlora"}}, "parallelism.tensor", 'by strategy "ddp", with tensor left out'),
        ({"adapter": {"type": "ia3"}}, "parallelism.tensor", 'by strategy "ddp", with tensor left out'),
        ({"adapter": {"type": "prefix"}}, "parallelism.tensor", 'by strategy "ddp", with tensor left out'),
        ({"adapter": {"use_dora": True}}, "parallelism.tensor", 'by strategy "fsdp", with tensor left out'),
        ({"hyper": {"optimizer": "adafactor"}}, "parallelism.tensor", 'take "adamw", or'),
        ({"activation_offloading": True}, "activation_offloading", "leave it out"),
    ],
)
def test_what_split_matrices_do_not_take_is_refused_with_what_works(
    more: dict[str, Any], param: str, words: str
) -> None:
    error = refuse(resources={"gpus": 2}, parallelism={"tensor": 2}, **more)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tensor_units": 1}, 'no plan for how to split the layers of llama; leave it out, strategy "fsdp"'),
        ({"tensor_units": 6}, 'not divisible by 4; 2, 3, 6 would do, and strategy "fsdp"'),
        ({"tensor_units": 4, "stacked_parameters": 8}, 'experts in stacks are not split; "ddp" and "fsdp" train them'),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused_with_the_sizes_that_can(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=r"parallelism\.tensor") as refused:
        plan_for(
            hardware=EIGHT,
            model=SMOL.model_copy(update=facts),
            resources={"gpus": 4},
            parallelism={"tensor": 4},
        )
    assert words in refused.value.message


def test_the_forecast_of_split_matrices_is_that_of_a_part() -> None:
    """Full fine-tuning: 16 bytes of each weight that a rank has, and those of norms whole."""
    model = SMOL.model_copy(
        update={"tensor_units": 4, "parameters": 1000, "trained_parameters": 1000, "whole_parameters": 200}
    )
    plan = plan_for(
        hardware=EIGHT,
        model=model,
        resources={"gpus": 4},
        parallelism={"tensor": 4},
        adapter={"type": "full"},
    )
    memory = plan.memory
    assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (1600, 1600, 3200)


@pytest.mark.parametrize(
    ("adapter", "kind"),
    [
        ({"use_dora": True}, "DoRA reads by itself"),
        ({"init": "pissa"}, "PiSSA reads by itself"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_adapters_that_read_frozen_weights_are_refused_where_those_are_taken_away(
    adapter: dict[str, Any], kind: str
) -> None:
    error = refuse(resources={"gpus": 2}, parallelism={"strategy": "zero3"}, adapter=adapter)
    assert error.param == "parallelism.strategy"
    assert f'{kind}; "zero2" and "fsdp" train' in error.message


def test_an_adapter_of_stacked_experts_is_refused_where_they_are_taken_away() -> None:
    with pytest.raises(SpecError, match='stacked experts for an adapter; "zero2" and "fsdp" train it'):
        plan_for(
            hardware=EIGHT,
            model=SMOL.model_copy(update={"stacked_parameters": 1024}),
            resources={"gpus": 8},
            parallelism={"strategy": "zero3"},
        )


@pytest.mark.parametrize("asked", [{"strategy": "zero9"}, {"pipeline": 2}, {"expert": 2}, {"offload": "params"}])
def test_what_is_not_offered_yet_is_refused_by_its_value(asked: dict[str, Any]) -> None:
    (name,) = asked
    error = refuse(parallelism=asked, resources={"gpus": 2})
    assert error.param == f"parallelism.{name}"
    assert error.code == ("invalid_value" if asked[name] == "zero9" else "not_offered")


@pytest.mark.parametrize(
    ("hyper", "field", "words"),
    [
        ({"batch_size": 5}, "batch_size", "batch_size 5 is not a multiple of 4 data-parallel ranks; 8 is one"),
        (
            {"batch_size": 10, "micro_batch_size": 5},
            "micro_batch_size",
            "batch_size 10 is not a multiple of micro_batch_size 5 x 4 data-parallel ranks; 20 is one",
        ),
        (
            {"batch_size": 12, "micro_batch_size": 3, "gradient_accumulation_steps": 4},
            "gradient_accumulation_steps",
            "batch_size 12 is not micro_batch_size 3 x gradient_accumulation_steps 4 x 4 data-parallel ranks",
        ),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused_with_the_numbers(
    hyper: dict[str, int], field: str, words: str
) -> None:
    error = refuse(hyper=hyper, resources={"gpus": 4})
    assert error.param == f"hyperparameters.{field}"
    assert words in error.message


@pytest.mark.parametrize(
    ("hyper", "batch", "micro", "cuts"),
    [
        ({}, 8, 1, 1),
        ({"micro_batch_size": 3}, 24, 3, 1),
        ({"micro_batch_size": 3, "gradient_accumulation_steps": 2}, 48, 3, 2),
        ({"batch_size": 32, "micro_batch_size": 2}, 32, 2, 2),
        ({"batch_size": 32, "gradient_accumulation_steps": 2}, 32, 2, 2),
        ({"batch_size": 64}, 64, 8, 1),
    ],
)
def test_batch_is_micro_batch_times_accumulation_times_ranks(
    hyper: dict[str, int], batch: int, micro: int, cuts: int
) -> None:
    plan = plan_for(hardware=EIGHT, resources={"gpus": 8}, hyper=hyper)
    assert (plan.ranks, plan.data, plan.strategy) == (8, 8, "ddp")
    assert (plan.batch_size, plan.micro_batch_size, plan.gradient_accumulation_steps) == (batch, micro, cuts)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9), ("fsdp", 1.9)]
)
def test_states_are_shared_as_in_the_table_of_the_paper(strategy: Strategy, gigabytes: float) -> None:
    """ZeRO (Rajbhandari et al. 2020, figure 1): 7.5 billion parameters in mixed precision, 2 + 2 + 12 bytes each, on 64
    GPUs."""
    parts = share_states(strategy, 64, *(int(7.5e9) * width for width in (2, 2, 12)))
    assert sum(parts) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [("ddp", 16), ("fsdp", 16 / 8), ("zero1", 8 + 12 / 8), ("zero2", 4 + 16 / 8), ("zero3", 20 / 8)],
)
def test_model_states_of_a_rank_are_16_bytes_a_parameter_or_their_share(strategy: str, numbers: float) -> None:
    """ZeRO (Rajbhandari et al. 2020, figure 1): K + 2 + 2 there is 8 + 4 + 4 here, with fp32 weights, and 12 + 4 + 4
    where DeepSpeed keeps a second copy of the weights, which is shared as the moments are. Stage 2 then comes to what
    DeepSpeed's own estimator says of it, 4 P + 16 P / N."""
    model = SMOL.model_copy(update={"trained_parameters": SMOL.parameters})
    plan = plan_for(
        hardware=EIGHT,
        model=model,
        resources={"gpus": 8},
        adapter={"type": "full"},
        parallelism={"strategy": strategy},
    )
    memory = plan.memory
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states == pytest.approx(numbers * SMOL.parameters, abs=3)
    assert plan.activation_offloading is False
