"""What strategies that share the rows of a batch among ranks have in common."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.errors import TrainingError
from training.plan import Plan
from training.rank.group import Group
from training.rank.model import get_base
from training.rank.parallel import SingleDevice


class DataParallel(SingleDevice):
    """Rows, and pieces of them with context parallelism, are shared among `data`, all ranks where it is not given, and
    gradients are averaged over them. Other ranks are at work on the same ones (mesh.py)."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group, data: Group | None = None) -> None:
        self.data = data or group
        # Neighbours share a row.
        self.data_rank, self.data_ranks = self.data.rank // plan.context, self.data.ranks // plan.context
        self.random_rank = self.data.rank
        super().__init__(model, plan, group)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss * self.data.ranks, last=last)  # for it is averaged over them

    def total(self, value: Tensor) -> Tensor:
        return self.data.total(value)

    def _gather_whole(self, part: Tensor) -> Tensor:
        part = part.detach()
        return self._keep(part.full_tensor() if isinstance(part, DTensor) else part)

    def _keep(self, whole: Tensor) -> Tensor:
        """What rank 0 keeps of a tensor that was gathered on all ranks."""
        return put_in_file(whole.detach(), self.scratch) if self.group.rank == 0 else whole.new_empty(0)


class Passes(nn.Module):
    """Stands in for the model: a pass is more than one call of it, methods switch its adapters on and off, and the loss
    is not what it gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def local_part(weight: Tensor) -> Tensor:
    """What this rank has of it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def fill_gradients(weights: Sequence[nn.Parameter], group: Group) -> list[nn.Parameter]:
    """The weights that have a gradient on any of the ranks, with zeros on those where there is none: so they can be
    summed. Of an expert that no token of any rank went to there is none, as on one device."""
    used = group.total(torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32))
    found = [weight for weight, ranks in zip(weights, used.tolist(), strict=True) if ranks]
    for weight in found:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return found


LARGE_BYTES = 2**20
"""A tensor of so many is put into a file while it is written."""


def put_in_file(whole: Tensor, folder: Path) -> Tensor:
    """A copy that lies in a file without a name, gone with the tensor: the system takes its memory back when it needs
    it, so that a model may be gathered that is larger than the memory of the host."""
    if whole.numel() * whole.element_size() < LARGE_BYTES:
        return whole.to("cpu", copy=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(whole.numel() * whole.element_size())
        copy = torch.from_file(file.name, shared=True, size=whole.numel(), dtype=whole.dtype).view(whole.shape)
    return copy.copy_(whole)


def gather_each(model: nn.Module, group: Group, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Whole weights of a model whose ranks keep parts of them, by their names, on rank 0; those of the base beside an
    adapter are left out. `gather` is called on all ranks, one weight after another."""
    adapted = get_base(model) is not model
    # Tied weights stand under each of their names, and are gathered once.
    whole: dict[Tensor, Tensor] = {}
    found = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if adapted and not weight.requires_grad:
            continue
        if weight not in whole:
            whole[weight] = gather(weight)
        found[name] = whole[weight]
    return found if group.rank == 0 else {}


@torch.no_grad()
def put_each(model: nn.Module, weights: Mapping[str, Tensor], put: Callable[[Tensor, Tensor], object]) -> None:
    """Whole weights in the place of a model's own: `put(own, whole)`.

    Raises:
        TrainingError: a name that the model does not have.
    """
    own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    unknown = [name for name in weights if name not in own]
    if unknown:
        raise TrainingError(f"the model has no weights {unknown[:3]}")
    for name, weight in weights.items():
        put(own[name], weight)
