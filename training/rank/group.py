"""The ranks of a run, and what they tell each other beside gradients. All call the same methods in the same order."""

import faulthandler
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from training.errors import BurnishError, RankDiedError
from training.rank.failure import explain
from training.rundir import COLLECTIVE_TIMEOUT_S, TIMEOUT_SETTING

T = TypeVar("T")

STACKS_AT = 0.8
"""Share of the time that a collective may take, after which each rank writes into the log where it stands."""


class Group(Protocol):
    rank: int
    ranks: int

    def first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on all ranks; the others do not call it. What it raises, all raise."""

    def any(self, wish: bool) -> bool:
        """Whether it is true of any rank."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""

    def highest(self, value: int) -> int: ...

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks."""


class Alone:
    """A run of one process."""

    rank, ranks = 0, 1

    def first(self, work: Callable[[], T]) -> T:
        return work()

    def any(self, wish: bool) -> bool:
        return wish

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def highest(self, value: int) -> int:
        return value

    def total(self, value: Tensor) -> Tensor:
        return value


class Ranks:
    """The processes that torchrun started, or some of them."""

    def __init__(self, members: dist.ProcessGroup | None = None) -> None:
        self.members = members
        self.rank, self.ranks = dist.get_rank(members), dist.get_world_size(members)

    def first(self, work: Callable[[], T]) -> T:
        told: list[Any] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                told = [(work(), None)]
            except Exception as caught:  # whatever it is, the others must not wait for it
                error = caught
                told = [(None, explain(caught))]
        dist.broadcast_object_list(told, group=self.members, group_src=0)
        value, failure = told[0]
        if failure is not None:
            raise error or failure
        result: T = value
        return result

    def any(self, wish: bool) -> bool:
        faulthandler.dump_traceback_later(STACKS_AT * find_timeout_s())
        told = torch.tensor([wish], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.members)
        return bool(told)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.members)
        return values

    def highest(self, value: int) -> int:
        told = torch.tensor([value])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.members)
        return int(told)

    def total(self, value: Tensor) -> Tensor:
        told = value.clone()
        dist.all_reduce(told, group=self.members)
        return told


def find_rank() -> tuple[int, int]:
    """Which rank this process is, and of how many."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def find_timeout_s() -> float:
    return float(os.environ.get(TIMEOUT_SETTING, COLLECTIVE_TIMEOUT_S))


def join_group(ranks: int, device: str) -> Group:
    """Meet the other ranks; on a GPU this rank takes its own.

    Raises:
        BurnishError: this process was not started as one of so many, or does not find them.
    """
    started = find_rank()[1]
    if ranks != started:
        raise BurnishError(
            f"the run has {ranks} ranks and {started} were started; start it with `python -m training run`"
        )
    if ranks == 1:
        return Alone()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=find_timeout_s())
    # Also of the groups that libraries make among some of the ranks.
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    if not dist.is_initialized():
        # What the ranks tell each other goes through the host: a GPU need not wait for it.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as bad:
            reason = str(bad).strip().splitlines()[0]
            message = (
                f"not all ranks came, or they do not reach each other ({reason}); between hosts all ports are used"
            )
            raise RankDiedError(message, code="rank_lost") from bad
    return Ranks()
