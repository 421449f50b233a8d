"""How a job is spread over devices: which mixes are offered, and what is said of the others."""

import argparse
from typing import Any

import pytest
from test_plan import A100, SMOL, plan_for

from training.devices import Layout, Strategy
from training.errors import SpecError
from training.hardware import Hardware
from training.memory import share_states
from training.node import add_arguments, find_node
from training.plan import choose_device
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
        (4, {"expert": 2}, "ddp", 4),
        (0, {"expert": 2}, "ddp", 2),
        (0, {"data": 6, "expert": 3}, "ddp", 6),
    ],
)
def test_ranks_are_the_gpus_and_on_the_cpu_what_data_says(
    gpus: int | str, asked: dict[str, Any], strategy: str, ranks: int
) -> None:
    spec = parse_spec({"model": "m", "training_file": "f", "resources": {"gpus": gpus}, "parallelism": asked})
    assert (spec.layout.strategy, spec.layout.ranks) == (strategy, ranks)
    assert spec.layout.data * asked.get("tensor", 1) == ranks


@pytest.mark.parametrize(
    ("resources", "data", "ranks", "local_ranks"),
    [
        ({"gpus": 16, "nodes": 2}, "auto", 16, 8),
        ({"gpus": 3, "nodes": 3}, "auto", 3, 1),
        ({"gpus": 0, "nodes": 2}, 4, 4, 2),
        ({"nodes": 2}, 2, 2, 1),
        ({"gpus": 4}, "auto", 4, 4),
    ],
)
def test_ranks_are_shared_evenly_among_the_nodes(
    resources: dict[str, Any], data: int | str, ranks: int, local_ranks: int
) -> None:
    body = {"model": "m", "training_file": "f", "resources": resources, "parallelism": {"data": data}}
    layout = parse_spec(body).layout
    assert (layout.nodes, layout.ranks, layout.local_ranks) == (resources.get("nodes", 1), ranks, local_ranks)


@pytest.mark.parametrize(
    ("resources", "data", "words"),
    [
        ({"gpus": 3, "nodes": 2}, "auto", "3 ranks cannot be shared evenly among 2 nodes; set resources.gpus"),
        ({"nodes": 2}, "auto", "1 rank cannot be shared evenly among 2 nodes"),
        ({"gpus": 0, "nodes": 2}, 3, "on the CPU parallelism.data, to a multiple of 2"),
        ({"nodes": 0}, "auto", "from 1 to 128"),
    ],
)
def test_nodes_that_cannot_be_given_as_many_ranks_each_are_refused(
    resources: dict[str, Any], data: int | str, words: str
) -> None:
    error = refuse(resources=resources, parallelism={"data": data})
    assert error.param == "resources.nodes"
    assert words in error.message


def test_each_host_needs_its_share_of_the_gpus_alone() -> None:
    body = {"model": "m", "training_file": "f", "resources": {"gpus": 16, "nodes": 2}}
    assert choose_device(parse_spec(body), EIGHT) == "cuda"
    body["resources"] = {"gpus": 18, "nodes": 2}
    with pytest.raises(SpecError, match=r"resources\.gpus: 18 asked on 2 nodes, 9 on each, this host has 8"):
        choose_device(parse_spec(body), EIGHT)


@pytest.mark.parametrize(
    ("nodes", "given", "words"),
    [
        (2, [], "resources.nodes: the run is on 2 hosts; start it on each, with --node-rank 0 to 1 and --rendezvous"),
        (2, ["--node-rank", "1"], "and --rendezvous HOST:PORT, an address of node 0"),
        (2, ["--node-rank", "2", "--rendezvous", "h:1"], "--node-rank: 2 is not one of 0 to 1"),
        (2, ["--node-rank", "0", "--rendezvous", "h"], '"h" is not HOST:PORT, such as'),
        (2, ["--node-rank", "0", "--rendezvous", "h:70000"], '"h:70000" is not HOST:PORT'),
        (1, ["--node-rank", "0"], "--node-rank: resources.nodes of the spec is 1; leave it out"),
        (1, ["--local-addr", "10.0.0.1"], "--local-addr: resources.nodes of the spec is 1"),
    ],
)
def test_a_command_line_that_does_not_fit_the_nodes_is_refused(nodes: int, given: list[str], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        find_node(parse_arguments(given), Layout("ddp", 2, 1, 1, 1, nodes=nodes))
    assert words in refused.value.message


@pytest.mark.parametrize("place", ["10.0.0.1:29500", "first.hosts.local:29500", "[fd00::1]:29500"])
def test_a_command_says_of_a_node_what_it_was_told(place: str) -> None:
    given = ["--node-rank", "1", "--rendezvous", place, "--local-addr", "10.0.0.2"]
    node = find_node(parse_arguments(given), Layout("ddp", 2, 1, 1, 1, nodes=2))
    assert node is not None
    assert node.as_arguments() == ["--node-rank", "1", "--rendezvous", place, "--local-addr", "10.0.0.2"]


def parse_arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


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
        (8, {"tensor": 2, "strategy": "zero1", "offload": "optimizer"}, "parallelism.offload", "leave one of them out"),
        (8, {"tensor": 2, "context": 2}, "parallelism.tensor", "not go together with context"),
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


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_weights_in_8_bits_are_refused_where_they_would_be_split(strategy: str) -> None:
    adapter = {"type": "qlora", "bits": 8}
    error = refuse(resources={"gpus": 2}, parallelism={"strategy": strategy}, adapter=adapter)
    assert error.param == "parallelism.strategy"
    assert '"zero2" and "ddp" train both' in error.message


@pytest.mark.parametrize(
    ("gpus", "strategy", "offload", "words"),
    [
        (1, "auto", "optimizer", 'the strategy is "none"; leave it out'),
        (2, "auto", "optimizer", 'the strategy is "ddp"; leave it out'),
        (2, "ddp", "params", 'goes with "fsdp" and "zero3", and the strategy is "ddp"; leave it out'),
        (2, "fsdp", "optimizer", '"params" moves all of it'),
        (2, "zero1", "params", '"optimizer" moves what is split'),
        (2, "zero2", "params", '"optimizer" moves what is split'),
        (2, "zero2", "all", 'not one of "none", "optimizer" or "params"'),
    ],
)
def test_what_cannot_wait_on_the_host_is_refused_with_what_can(
    gpus: int, strategy: str, offload: str, words: str
) -> None:
    error = refuse(resources={"gpus": gpus}, parallelism={"strategy": strategy, "offload": offload})
    assert (error.param, error.code) == ("parallelism.offload", "invalid_value")
    assert words in error.message


def test_an_adapter_of_stacked_experts_is_refused_where_they_are_taken_away() -> None:
    with pytest.raises(SpecError, match='stacked experts for an adapter; "zero2" and "fsdp" train it'):
        plan_for(
            hardware=EIGHT,
            model=SMOL.model_copy(update={"stacked_parameters": 1024}),
            resources={"gpus": 8},
            parallelism={"strategy": "zero3"},
        )


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


@pytest.mark.parametrize(
    ("strategy", "offload", "device", "host"),
    [
        ("zero1", "optimizer", 8, 24 / 8),
        ("zero2", "optimizer", 4, 24 / 8),
        ("zero3", "optimizer", 4 / 8, 20 / 8),
        ("zero3", "params", 0, 24 / 8),
        ("fsdp", "params", 0, 16 / 8),
    ],
)
@pytest.mark.parametrize("is_gpu", [True, False])
def test_what_is_offloaded_counts_on_the_host(
    strategy: str, offload: str, device: float, host: float, is_gpu: bool
) -> None:
    """Bytes a parameter: weights and gradients 4, moments 8; on the host DeepSpeed keeps the copy that it steps, its
    gradient, the gradient that is summed, and with stages 1 and 2 the new weights before they go back."""
    model = SMOL.model_copy(update={"trained_parameters": SMOL.parameters})
    plan = plan_for(
        hardware=EIGHT,
        model=model,
        resources={"gpus": 8 if is_gpu else 0},
        adapter={"type": "full"},
        parallelism={"strategy": strategy, "offload": offload, "data": 8},
    )
    memory = plan.memory
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert plan.offload == offload
    assert memory.total_bytes == states + memory.activations_bytes + memory.logits_bytes
    want = (device, host) if is_gpu else (device + host, 0)
    assert states == pytest.approx(want[0] * SMOL.parameters, abs=3)
    assert memory.host_bytes == pytest.approx(want[1] * SMOL.parameters, abs=3)


@pytest.mark.parametrize(("strategy", "parts"), [("zero2", 1), ("zero3", 8), ("fsdp", 8)])
def test_scales_of_quantised_weights_are_whole_on_each_rank(strategy: str, parts: int) -> None:
    """4 bits a weight are split; an fp32 scale for each 64 weights is not (QLoRA, Dettmers et al. 2023, section 3)."""
    model = SMOL.model_copy(update={"quantised_parameters": 100_000_000})
    plan = plan_for(
        hardware=EIGHT,
        model=model,
        resources={"gpus": 8},
        adapter={"type": "qlora", "double_quant": False},
        parallelism={"strategy": strategy},
    )
    rest = (SMOL.parameters - 100_000_000) * 2 + SMOL.trained_parameters * 4
    assert plan.memory.weights_bytes == pytest.approx((50_000_000 + rest) / parts + 100_000_000 * 4 / 64, abs=1)


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
