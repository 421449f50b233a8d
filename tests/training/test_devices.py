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
    ],
)
def test_ranks_are_the_gpus_and_on_the_cpu_what_data_says(
    gpus: int | str, asked: dict[str, Any], strategy: str, ranks: int
) -> None:
    spec = parse_spec({"model": "m", "training_file": "f", "resources": {"gpus": gpus}, "parallelism": asked})
    assert (spec.layout.strategy, spec.layout.ranks, spec.layout.data) == (strategy, ranks, ranks)


@pytest.mark.parametrize(
    ("gpus", "asked", "param", "words"),
    [
        (4, {"strategy": "none"}, "parallelism.strategy", '"none" is for one device, and there are 4; set "auto"'),
        (1, {"strategy": "ddp"}, "parallelism.strategy", "set resources.gpus to 2 or more"),
        ("auto", {"strategy": "fsdp"}, "parallelism.strategy", "on the CPU parallelism.data"),
        ("auto", {"strategy": "zero2"}, "parallelism.strategy", "on the CPU parallelism.data"),
        (3, {"data": 2}, "parallelism.data", "takes 2 GPUs, and resources.gpus is 3; make them equal"),
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


@pytest.mark.parametrize("asked", [{"strategy": "zero9"}, {"tensor": 2}, {"expert": 2}, {"offload": "params"}])
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


def test_context_is_not_for_preferences_and_prefixes() -> None:
    parallelism = {"context": 2}
    for more in ({"method": {"type": "dpo"}}, {"method": {"type": "kto"}}, {"adapter": {"type": "prompt"}}):
        assert refuse(parallelism=parallelism, **more).param == "parallelism.context"


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ({"attention_heads": 9}, {}, "parallelism.context: 2 does not divide the heads of llama; 3, 9 divide its 9"),
        ({"attends_to_all": False}, {}, "parallelism.context: attention of llama cannot be computed by heads"),
        ({"attention_heads": 8}, {"attention": "eager"}, 'parallelism.context: attention "eager" cannot be computed'),
    ],
)
def test_a_model_that_cannot_be_cut_into_pieces_of_rows_is_refused(
    model: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    facts = SMOL.model_copy(update=model)
    with pytest.raises(SpecError) as refused:
        plan_for(model=facts, parallelism={"context": 2}, resources={"gpus": 0}, **asked)
    assert refused.value.message.startswith(said)
    assert refused.value.param == "parallelism.context"


PIPELINE = {"resources": {"gpus": 4}, "parallelism": {"pipeline": 2}}


@pytest.mark.parametrize(
    ("gpus", "asked", "sizes"),
    [
        (2, {"pipeline": 2}, ("none", 1, 2, "1f1b")),
        (8, {"pipeline": 2}, ("ddp", 4, 2, "1f1b")),
        (8, {"pipeline": 4, "data": 2, "schedule": "interleaved"}, ("ddp", 2, 4, "interleaved")),
        (0, {"pipeline": 2}, ("none", 1, 2, "1f1b")),
        (0, {"pipeline": 2, "data": 3}, ("ddp", 3, 2, "1f1b")),
        (8, {}, ("ddp", 8, 1, None)),
    ],
)
def test_ranks_of_a_pipeline_are_those_of_its_copies(gpus: int, asked: dict[str, Any], sizes: tuple[Any, ...]) -> None:
    spec = parse_spec({"model": "m", "training_file": "f", "resources": {"gpus": gpus}, "parallelism": asked})
    layout = spec.layout
    assert (layout.strategy, layout.data, layout.pipeline, layout.schedule) == sizes
    assert layout.ranks == layout.data * layout.pipeline


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"method": {"type": "dpo"}}, "parallelism.pipeline", '"ddp" and "fsdp" train it'),
        ({"method": {"type": "kto"}}, "parallelism.pipeline", '"ddp" and "fsdp" train it'),
        ({"adapter": {"type": "qlora"}}, "parallelism.pipeline", '"ddp" trains qlora'),
        ({"adapter": {"type": "prompt"}}, "parallelism.pipeline", '"ddp" trains it'),
        ({"adapter": {"type": "prefix"}}, "parallelism.pipeline", '"ddp" trains it'),
        ({"adapter": {"init": "pissa"}}, "parallelism.pipeline", '"ddp" and "fsdp" train it'),
        ({"adapter": {"modules_to_save": ["lm_head"]}}, "parallelism.pipeline", '"ddp" and "fsdp" train them'),
        ({"activation_offloading": True}, "activation_offloading", "leave it out"),
        ({"attention": "flash"}, "attention", 'take "sdpa"'),
        ({"parallelism": {"pipeline": 2, "strategy": "fsdp"}}, "parallelism.strategy", '"ddp" does'),
        ({"parallelism": {"pipeline": 2, "context": 2}}, "parallelism.pipeline", "does not go with context"),
        ({"parallelism": {"pipeline": 3}}, "parallelism.data", "takes 3 GPUs, and resources.gpus is 4"),
        ({"parallelism": {"schedule": "interleaved"}}, "parallelism.schedule", "set pipeline to 2 or more"),
        ({"parallelism": {"pipeline": 2, "schedule": "gpipe"}}, "parallelism.schedule", '"1f1b"'),
    ],
)
def test_what_does_not_go_through_a_pipeline_is_refused_with_what_works(
    more: dict[str, Any], param: str, words: str
) -> None:
    error = refuse(**{**PIPELINE, **more})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("layers", "schedule", "param", "words"),
    [
        (1, "1f1b", "pipeline", "has 1 layers, and there would be 2 stages; take 1 ranks at most"),
        (3, "interleaved", "schedule", 'has 3 layers, and there would be 4 stages; take "1f1b"'),
    ],
)
def test_a_model_with_fewer_layers_than_stages_is_refused(layers: int, schedule: str, param: str, words: str) -> None:
    model = SMOL.model_copy(update={"layers": layers})
    with pytest.raises(SpecError, match=words) as refused:
        plan_for(hardware=EIGHT, model=model, **{**PIPELINE, "parallelism": {"pipeline": 2, "schedule": schedule}})
    assert refused.value.param == f"parallelism.{param}"


def test_a_pipeline_is_kept_busy_by_passes_and_says_so() -> None:
    """Four for each rank where the batch has as many rows; no number of tokens lays short rows together."""
    plan = plan_for(hardware=EIGHT, hyper={"batch_size": 64}, **PIPELINE)
    assert (plan.data, plan.pipeline, plan.micro_batch_size, plan.gradient_accumulation_steps) == (2, 2, 4, 8)
    assert plan.tokens_per_pass is None
    assert "4 passes for each rank of the pipeline" in plan.reasons["micro_batch_size"]
    assert (plan.schedule, "as 1 passes take" in plan.reasons["schedule"]) == ("1f1b", True)
    few = plan_for(hardware=EIGHT, hyper={"batch_size": 4}, **PIPELINE)
    assert (few.micro_batch_size, few.gradient_accumulation_steps) == (1, 2)


@pytest.mark.parametrize(("schedule", "layers", "under_way"), [("1f1b", 15, 2), ("interleaved", 8 + 8, 3)])
def test_the_rank_of_a_pipeline_that_has_most_is_forecast(schedule: str, layers: int, under_way: float) -> None:
    """16 bytes a parameter in fp32, of its layers and of the embeddings; and in a step of 8 passes the activations of
    as many as are under way (Narayanan et al. 2021, section 2.2), in its layers. 200 tokens are handed on in each pass,
    and their gradient back."""
    model = SMOL.model_copy(update={"trained_parameters": SMOL.parameters})
    more: dict[str, Any] = {"hyper": {"batch_size": 16, "micro_batch_size": 1}, "adapter": {"type": "full"}}
    alone = plan_for(hardware=EIGHT, model=model, resources={"gpus": 1}, **more).memory
    asked = {"pipeline": 2, "schedule": schedule}
    memory = plan_for(hardware=EIGHT, model=model, **{**PIPELINE, "parallelism": asked}, **more).memory
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    embeddings = SMOL.vocabulary * SMOL.hidden_size
    assert states == pytest.approx(16 * (embeddings + (SMOL.parameters - embeddings) * layers / 30), rel=1e-6)
    kept = memory.activations_bytes - 8 * 2 * 200 * SMOL.hidden_size * 4
    assert kept == pytest.approx(alone.activations_bytes * under_way * layers / 30)
