"""The devices of a job: how many it asks for, and how its training is spread over them."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import model_validator

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
