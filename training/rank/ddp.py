"""Data parallel (Li et al. 2020, arXiv:2006.15704): each rank keeps the whole model, and gradients are summed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.plan import Plan
from training.rank.data_parallel import DataParallel, Passes
from training.rank.group import Group

T = TypeVar("T")


class Ddp(DataParallel):
    """The gradients of all ranks are averaged in the backward pass of a window's last pass, while it goes on."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        super().__init__(model, plan, group)
        for weight in self._trained.values():
            dist.broadcast(weight.data, src=0)
        # What is frozen is the same file on all ranks. A weight without a gradient in the last pass is no fault: of an
        # expert that no token went to, for one.
        self._passes = DistributedDataParallel(
            Passes(model),
            forward_sync_buffers=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            init_sync=False,
        )

    def forward(self, work: Callable[[], T], *, last: bool) -> T:
        with nullcontext() if last else self._passes.no_sync(), self.compute():
            made: T = self._passes(work)
            return made
