"""The devices of a job: how many it asks for, and how its training is spread over them."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from training.adapter import Adapter
from training.fields import Auto, Part, at, whole

Strategy = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Offload = Literal["none", "optimizer", "params"]
Schedule = Literal["1f1b", "interleaved"]

SHARDS_WEIGHTS = {"fsdp", "zero3"}
"""Strategies whose ranks each keep a part of every weight."""

SHARDS_STATES = {"fsdp", "zero1", "zero2", "zero3"}
"""Strategies whose ranks each keep a part of the optimizer's moments."""


class Resources(Part):
    gpus: Annotated[int | Auto, whole(0, auto=True)] = "auto"
    "GPUs of the job; auto is one where the host has GPUs, else the CPU. 0 asks for the CPU."
    nodes: Annotated[int, whole(1, 128)] = 1
    "Hosts among which the ranks are shared evenly; `gpus` is of all of them together."
    priority: Annotated[int, whole(-100, 100)] = 0
    "Higher goes first."
    max_attempts: Annotated[int, whole(1, 20)] = 3
    "How often an attempt that the infrastructure ended is started in all."


class Parallelism(Part):
    """How training is spread over the devices of `resources`, one process (rank) each. docs/parallelism.md compares."""

    strategy: Strategy | Auto = "auto"
    "What each rank keeps of weights, gradients and moments; auto is ddp on several devices."
    data: Annotated[int | Auto, whole(1, 1024, auto=True)] = "auto"
    "Ranks among which the rows of a batch are shared; auto is what the GPUs allow. On the CPU the number of processes."
    tensor: Annotated[int, whole(1, 1024)] = 1
    "Ranks among which each matrix is split."
    pipeline: Annotated[int, whole(1, 1024)] = 1
    "Ranks among which the layers are split."
    schedule: Schedule | Auto = "auto"
    "Of a pipeline: the order in which its ranks make the passes of a step; auto is 1f1b."
    expert: Annotated[int, whole(1, 1024)] = 1
    "Data-parallel ranks among which the experts of a layer are split; each token is sent to the rank of its expert."
    context: Annotated[int, whole(1, 1024)] = 1
    "Ranks among which the tokens of each pass are split, for rows that do not fit one device."
    offload: Offload = "none"
    "What waits in the host's memory: what the optimizer keeps (zero1, zero2, zero3), or the weights too (zero3, fsdp)."

    @model_validator(mode="after")
    def _has_a_pipeline(self) -> Self:
        if self.schedule != "auto" and self.pipeline == 1:
            raise at("schedule", "is the order of the passes in a pipeline; set pipeline to 2 or more, or leave it out")
        return self


@dataclass(frozen=True)
class Layout:
    """The ranks of a run, all named: there are data x context x tensor x pipeline of them."""

    strategy: Strategy
    data: int
    tensor: int
    pipeline: int
    expert: int
    context: int = 1
    nodes: int = 1
    schedule: Schedule | None = None

    @property
    def ranks(self) -> int:
        return self.copies * self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Ranks that have the same weights, whole or in parts, and whose gradients are summed."""
        return self.data * self.context

    @property
    def local_ranks(self) -> int:
        """On each node; ranks that follow each other are on one node."""
        return self.ranks // self.nodes


def make_layout(asked: Parallelism, resources: Resources) -> Layout:
    """Decided by the spec alone, before a host is known. Raises as a validator does, for sizes that do not go together
    with `resources.gpus`."""
    of_model = asked.context * asked.tensor * asked.pipeline
    gpus = None if resources.gpus in ("auto", 0) else int(resources.gpus)
    data = (gpus or of_model * asked.expert) // of_model if asked.data == "auto" else asked.data
    if gpus is not None and data * of_model != gpus:
        sizes = f"data {max(1, data)} x tensor {asked.tensor} x pipeline {asked.pipeline}"
        sizes += f" x context {asked.context}" if asked.context > 1 else ""
        message = f"{sizes} takes {max(1, data) * of_model} GPUs, and resources.gpus is {gpus}; make them equal"
        raise at("parallelism.data", f'{message}, or leave data out ("auto")')
    nodes, ranks = resources.nodes, data * of_model
    if ranks % nodes:
        what = f"{ranks} {'rank' if ranks == 1 else 'ranks'} cannot be shared evenly among {nodes} nodes"
        raise at(
            "resources.nodes", f"{what}; set resources.gpus, on the CPU parallelism.data, to a multiple of {nodes}"
        )
    strategy = asked.strategy
    if strategy == "auto":
        strategy = "ddp" if data * asked.context > 1 else "none"
    schedule: Schedule | None = None if asked.pipeline == 1 else "1f1b" if asked.schedule == "auto" else asked.schedule
    return Layout(
        strategy,
        data=data,
        tensor=asked.tensor,
        pipeline=asked.pipeline,
        expert=asked.expert,
        context=asked.context,
        nodes=nodes,
        schedule=schedule,
    )


def count_stages(pipeline: int, schedule: Schedule | None) -> int:
    """Interleaved, each rank has two: it waits half as long for the others (Narayanan et al. 2021, section 2.2)."""
    return 2 * pipeline if schedule == "interleaved" else pipeline


def share_layers(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: as many as the others, or one more. The last ones have the head too."""
    return [-(-layers * (stage + 1) // stages) - -(-layers * stage // stages) for stage in range(stages)]


def find_conflict(
    layout: Layout, adapter: Adapter, optimizer: str, *, activation_offloading: bool, offload: Offload = "none"
) -> PydanticCustomError | None:
    """What cannot run in this layout, with what can."""
    strategy = layout.strategy
    if offload == "optimizer" and not strategy.startswith("zero"):
        how = '; "params" moves all of it' if strategy == "fsdp" else "; leave it out"
        message = f'"optimizer" goes with "zero1", "zero2" and "zero3", and the strategy is "{strategy}"{how}'
        return at("parallelism.offload", message)
    if offload == "params" and strategy not in SHARDS_WEIGHTS:
        how = '; "optimizer" moves what is split' if strategy in SHARDS_STATES else "; leave it out"
        message = f'"params" goes with "fsdp" and "zero3", and the strategy is "{strategy}"{how}'
        return at("parallelism.offload", message)
    if offload != "none" and layout.tensor > 1:
        return at("parallelism.offload", "what parallelism.tensor has split stays on its device; leave one of them out")
    if layout.expert > 1 and (conflict := _find_expert_conflict(layout, adapter, optimizer, activation_offloading)):
        return conflict
    if layout.tensor > 1 and (conflict := _find_tensor_conflict(layout, adapter, optimizer, activation_offloading)):
        return conflict
    if strategy == "none" and layout.copies > 1:
        message = f'"none" is for one device, and there are {layout.copies}; set "auto" or "ddp"'
        return at("parallelism.strategy", message)
    if (strategy == "ddp" or strategy in SHARDS_STATES) and layout.copies == 1:
        how = "set resources.gpus to 2 or more, on the CPU parallelism.data, or leave the strategy out"
        if layout.ranks > 1:
            how = "set parallelism.data to 2 or more, or leave the strategy out"
        return at("parallelism.strategy", f'"{strategy}" shares rows among devices, and parallelism.data is 1; {how}')
    if layout.context > 1 and adapter.virtual_tokens:
        return at("parallelism.context", f"a {adapter.type} stands before whole rows only; leave context at 1")
    if strategy not in SHARDS_STATES:
        return None
    if strategy in SHARDS_WEIGHTS and adapter.type == "qlora" and adapter.bits == 8:
        message = f'"{strategy}" splits weights in 4 bits, not in 8; "zero2" and "ddp" train both'
        return at("parallelism.strategy", message)
    if adapter.virtual_tokens:
        return at("parallelism.strategy", f'"{strategy}" does not split a {adapter.type}; "ddp" trains it')
    if strategy == "zero3" and adapter.is_low_rank and (adapter.use_dora or adapter.init == "pissa"):
        kind = "DoRA" if adapter.use_dora else "PiSSA"
        message = f'"zero3" does not gather the weights that {kind} reads by itself; "zero2" and "fsdp" train it'
        return at("parallelism.strategy", message)
    if strategy == "zero3" and adapter.modules_to_save:
        message = '"zero3" does not gather adapter.modules_to_save; "zero2" and "fsdp" train them'
        return at("parallelism.strategy", message)
    if optimizer != "adamw":
        message = f'"{strategy}" does not split the moments of {optimizer}; take "adamw", or "ddp"'
        return at("parallelism.strategy", message)
    if activation_offloading:
        message = f'not together with "{strategy}", which moves tensors by itself; leave it out, or take "ddp"'
        return at("activation_offloading", message)
    return None


def _find_expert_conflict(
    layout: Layout, adapter: Adapter, optimizer: str, activation_offloading: bool
) -> PydanticCustomError | None:
    expert, param = layout.expert, "parallelism.expert"
    others = [name for name in ("tensor", "pipeline", "context") if getattr(layout, name) > 1]
    if others:
        return at(param, f"experts are split among data-parallel ranks alone; leave {others[0]} at 1, or this")
    if layout.data % expert:
        message = f"experts are split among data-parallel ranks, and {expert} does not divide the {layout.data} of them"
        return at(param, f"{message}; make parallelism.data a multiple of it, or leave it at 1")
    if layout.strategy != "ddp":
        return at(param, f'"{layout.strategy}" does not split experts; "ddp" does, or leave it at 1')
    if adapter.type == "qlora":
        return at(param, 'quantised models are loaded onto each device whole; "lora" is trained, or leave it at 1')
    if optimizer != "adamw":
        return at(param, f'the moments of {optimizer} are not split; take "adamw", or leave it at 1')
    if activation_offloading:
        return at("activation_offloading", "not together with parallelism.expert; leave one of them out")
    return None


def _find_tensor_conflict(
    layout: Layout, adapter: Adapter, optimizer: str, activation_offloading: bool
) -> PydanticCustomError | None:
    """What does not go together with matrices that are split among ranks."""
    strategy, param = layout.strategy, "parallelism.tensor"
    others = [name for name in ("pipeline", "context") if getattr(layout, name) > 1]
    if others:
        return at(param, f"it does not go together with {others[0]}; leave that at 1, or this")
    if strategy not in ("none", "ddp", "zero1"):
        message = f'"{strategy}" does not go together with parallelism.tensor; "ddp" and "zero1" do'
        return at("parallelism.strategy", message)
    if adapter.type not in ("full", "lora", "prompt"):
        message = f'{adapter.type} is not trained on split matrices; it is by strategy "ddp", with tensor left out'
        return at(param, message)
    if adapter.use_dora:
        return at(param, 'DoRA is not trained on split matrices; it is by strategy "fsdp", with tensor left out')
    if optimizer != "adamw":
        message = f'{optimizer} does not step parts of weights; take "adamw", or strategy "ddp" with tensor left out'
        return at(param, message)
    if activation_offloading:
        return at("activation_offloading", "not together with parallelism.tensor; leave it out, or take tensor 1")
    return None


def find_pipeline_conflict(
    layout: Layout, adapter: Adapter, method: str, attention: str, *, activation_offloading: bool
) -> PydanticCustomError | None:
    """What cannot run in a pipeline, with what can."""
    if layout.pipeline == 1:
        return None
    if layout.strategy in SHARDS_STATES:
        return at("parallelism.strategy", f'"{layout.strategy}" does not go with a pipeline; "ddp" does')
    for other in ("tensor", "expert", "context"):
        if getattr(layout, other) > 1:
            return at("parallelism.pipeline", f"does not go with {other}; leave one of the two at 1")
    if attention == "flash":  # the whole model is tried on the host, before a rank takes its part
        return at("attention", '"flash" does not go with a pipeline; take "sdpa"')
    if method in ("dpo", "kto"):
        why = f'{method} compares each row with a reference in the same pass; "ddp" and "fsdp" train it'
        return at("parallelism.pipeline", f"{why}, with pipeline 1")
    if adapter.type == "qlora":
        return at("parallelism.pipeline", 'quantised weights are not split; "ddp" trains qlora, with pipeline 1')
    if adapter.virtual_tokens:
        why = f'a {adapter.type} stands before the first layer and is not handed on; "ddp" trains it, with pipeline 1'
        return at("parallelism.pipeline", why)
    if adapter.init == "pissa":
        return at("parallelism.pipeline", 'PiSSA is not split; "ddp" and "fsdp" train it, with pipeline 1')
    if adapter.modules_to_save:
        why = 'adapter.modules_to_save are not split; "ddp" and "fsdp" train them, with pipeline 1'
        return at("parallelism.pipeline", why)
    if activation_offloading:
        why = "not together with a pipeline, where several passes are under way at once; leave it out"
        return at("activation_offloading", why)
    return None
