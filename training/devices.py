"""The devices of a job: how many it asks for, and how its training is spread over them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from training.adapter import Adapter
from training.fields import Auto, Part, at, show, whole

Strategy = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Offload = Literal["none", "optimizer", "params"]
_VALUES: dict[str, Any] = {"strategy": Strategy, "offload": Offload}

NOT_OFFERED: set[tuple[str, object]] = {
    ("offload", "optimizer"),
    ("offload", "params"),
}
"""Values of the contract that this version refuses by name."""

SIZES_NOT_OFFERED = {
    "pipeline",
    "expert",
}
"""Fields that this version takes the value 1 of."""

SHARDS_WEIGHTS = {"fsdp", "zero3"}
"""Strategies whose ranks each keep a part of every weight."""

SHARDS_STATES = {"fsdp", "zero1", "zero2", "zero3"}
"""Strategies whose ranks each keep a part of the optimizer's moments."""


class Resources(Part):
    gpus: Annotated[int | Auto, whole(0, auto=True)] = "auto"
    "GPUs of the job; auto is one where the host has GPUs, else the CPU. 0 asks for the CPU."
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
    expert: Annotated[int, whole(1, 1024)] = 1
    "Ranks among which the experts of a layer are split."
    offload: Offload = "none"
    "What is kept in the host's memory."

    @model_validator(mode="after")
    def _offered(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if (name, value) in NOT_OFFERED:
                raise at(name, f"{show(value)} is not offered yet; there is {_list_offered(name)}", "not_offered")
            if name in SIZES_NOT_OFFERED and value != 1:
                raise at(name, f"{value} is not offered yet; leave it at 1", "not_offered")
        return self


@dataclass(frozen=True)
class Layout:
    """The ranks of a run, all named: there are data x tensor x pipeline of them."""

    strategy: Strategy
    data: int
    tensor: int
    pipeline: int
    expert: int

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline


def make_layout(asked: Parallelism, resources: Resources) -> Layout:
    """Decided by the spec alone, before a host is known. Raises as a validator does, for sizes that do not go together
    with `resources.gpus`."""
    of_model = asked.tensor * asked.pipeline
    gpus = None if resources.gpus in ("auto", 0) else int(resources.gpus)
    data = (gpus or of_model) // of_model if asked.data == "auto" else asked.data
    if gpus is not None and data * of_model != gpus:
        sizes = f"data {max(1, data)} x tensor {asked.tensor} x pipeline {asked.pipeline}"
        message = f"{sizes} takes {max(1, data) * of_model} GPUs, and resources.gpus is {gpus}; make them equal"
        raise at("parallelism.data", f'{message}, or leave data out ("auto")')
    strategy = asked.strategy
    if strategy == "auto":
        strategy = "ddp" if data > 1 else "none"
    return Layout(strategy, data, asked.tensor, asked.pipeline, asked.expert)


def find_conflict(
    layout: Layout, adapter: Adapter, optimizer: str, *, activation_offloading: bool
) -> PydanticCustomError | None:
    """What cannot run in this layout, with what can."""
    strategy = layout.strategy
    if strategy == "none" and layout.data > 1:
        return at("parallelism.strategy", f'"none" is for one device, and there are {layout.data}; set "auto" or "ddp"')
    if layout.tensor > 1 and (conflict := _find_tensor_conflict(layout, adapter, optimizer, activation_offloading)):
        return conflict
    if (strategy == "ddp" or strategy in SHARDS_STATES) and layout.data == 1:
        how = "set resources.gpus to 2 or more, on the CPU parallelism.data, or leave the strategy out"
        if layout.ranks > 1:
            how = "set parallelism.data to 2 or more, or leave the strategy out"
        return at("parallelism.strategy", f'"{strategy}" shares rows among devices, and parallelism.data is 1; {how}')
    if strategy not in SHARDS_STATES:
        return None
    if adapter.type == "qlora":
        return at("parallelism.strategy", f'"{strategy}" does not split quantised weights; "ddp" trains qlora')
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


def _find_tensor_conflict(
    layout: Layout, adapter: Adapter, optimizer: str, activation_offloading: bool
) -> PydanticCustomError | None:
    """What does not go together with matrices that are split among ranks."""
    strategy, param = layout.strategy, "parallelism.tensor"
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


def _list_offered(name: str) -> str:
    offered = [f'"{value}"' for value in get_args(_VALUES[name]) if (name, value) not in NOT_OFFERED]
    return " or ".join(part for part in (", ".join(offered[:-1]), offered[-1]) if part)
