"""Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053): each rank keeps a part of every matrix, and computes with it
its part of every layer. Several such groups of ranks may share the rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.errors import ModelError
from training.plan import Plan
from training.rank.data_parallel import DataParallel, fill_gradients, gather_each, local_part, put_each
from training.rank.group import Group, Ranks
from training.rank.mesh import find_data_group, make_mesh
from training.rank.optim import build_optimizer
from training.rank.parallel import SingleDevice
from training.rank.tensor_cut import cast_parts, cut, cut_like, is_cut

BUCKET_NUMBERS = 2**25
"""Gradients or weights that are exchanged at once; the copy of them is there meanwhile."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class TensorParallel(DataParallel):
    """The optimizer steps this rank's parts, as weights of their own that lie in the same memory. What is whole on all
    ranks, such as norms, has the same gradient on all, and stays the same."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        mesh = make_mesh(plan)
        self._tensor = Ranks(mesh["tensor"].get_group())
        self._is_first = True
        cut(model, mesh["tensor"], torch.device(plan.device))
        super().__init__(model, plan, group, find_data_group(mesh))
        for name, weight in self._trained.items():
            if name not in self._cut:
                self._spread(weight, 0, self._tensor)
            self._spread(weight, 0, self.data)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        SingleDevice.backward(self, loss, last=last)  # gradients are summed here, not averaged
        if last:
            self._take_gradients()

    def drop_gradients(self) -> None:
        for weight in (*self._trained.values(), *self.model.parameters()):
            weight.grad = None

    def gather_weights(self) -> dict[str, Tensor]:
        return gather_each(self.model, self.group, self._gather_whole)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        put_each(self.model, weights, lambda own, whole: local_part(own).copy_(cut_like(own, whole)))

    def cast_weights(self, dtype: torch.dtype) -> None:
        cast_parts(self.model, dtype)

    def _find_trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        self._weights = super()._find_trained(model)
        self._cut = {name for name, weight in self._weights.items() if is_cut(weight)}
        return {name: nn.Parameter(local_part(weight.detach())) for name, weight in self._weights.items()}

    def _take_gradients(self) -> None:
        """The summed gradients of the ranks that share the rows, on this rank's parts."""
        for name, weight in self._weights.items():
            gradient = weight.grad
            if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
                gradient = gradient.redistribute(placements=weight.placements).to_local()
            self._trained[name].grad = gradient
        if self._is_first:
            self._require_same_gradients()
        if self.data.ranks == 1:
            return
        parts = fill_gradients(list(self._trained.values()), self.data)
        for some in _cut_list([weight.grad for weight in parts if weight.grad is not None]):
            _put_back(some, self.data.total(torch.cat([gradient.flatten() for gradient in some])))

    def _require_same_gradients(self) -> None:
        """Raises ModelError where the plan is wrong in training: where each rank has another gradient for a weight that
        is whole on all, which each would go on to train by itself. Once, which is enough."""
        found = {name: weight.grad for name, weight in self._trained.items() if name not in self._cut}
        norms = {name: float(gradient.norm()) for name, gradient in found.items() if gradient is not None}
        told = self._tensor.gather(norms)
        self._is_first = not all(math.isfinite(norm) for of_rank in told for norm in of_rank.values())
        unlike = find_unlike(told)
        if unlike and not self._is_first:
            message = f"the plan for how to split this model gives ranks other gradients for {unlike[0]}"
            raise ModelError(f'{message}; leave parallelism.tensor out, "fsdp" trains it', param="parallelism.tensor")

    def _find_norm(self, gradients: list[Tensor]) -> Tensor:  # noqa: ARG002 - they are these
        """Each part counts once, and what is whole on all ranks as well."""
        found = {name: weight.grad for name, weight in self._trained.items() if weight.grad is not None}
        whole = [gradient for name, gradient in found.items() if name not in self._cut]
        squares = [
            super(TensorParallel, self)._find_norm(some).to(self.device) ** 2
            for some in ([gradient for name, gradient in found.items() if name in self._cut], whole)
        ]
        return (self._tensor.total(squares[0]) + squares[1]).sqrt()

    def _whole(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:
        weight = self._weights[name]
        return {
            kind: self._gather_whole(_as_part(value, weight)) if _is_like(value, self._trained[name]) else value
            for kind, value in moments.items()
        }

    def _own_part(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:
        weight = self._weights[name]
        return {kind: cut_like(weight, value) if _is_like(value, weight) else value for kind, value in moments.items()}

    def _spread(self, value: Tensor, source: int, members: Group) -> None:
        if isinstance(members, Ranks) and members.ranks > 1:
            dist.broadcast(value.data, group=members.members, group_src=source)


class TensorZero(TensorParallel):
    """Moments are shared among the ranks that share the rows (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054):
    each has those of some weights, as many numbers as the others, steps them, and gives them to the others."""

    def _build_optimizer(self, plan: Plan) -> torch.optim.Optimizer:
        self._owners = {}
        numbers = [0] * self.data_ranks
        for name, weight in sorted(self._trained.items(), key=lambda named: -named[1].numel()):
            self._owners[name] = numbers.index(min(numbers))
            numbers[self._owners[name]] += weight.numel()
        own = {name: weight for name, weight in self._trained.items() if self._owners[name] == self.data_rank}
        return build_optimizer(own, plan)

    @torch.no_grad()
    def _change_weights(self) -> None:
        super()._change_weights()
        for owner in range(self.data_ranks):
            weights = [weight.data for name, weight in self._trained.items() if self._owners[name] == owner]
            for some in _cut_list(weights):
                flat = torch.cat([weight.flatten() for weight in some])
                self._spread(flat, owner, self.data)
                _put_back(some, flat)

    def optimizer_state(self) -> dict[str, Any]:
        mine = self._optimizer.state
        steps = {name: float(mine[weight]["step"]) for name, weight in self._trained.items() if weight in mine}
        every = {name: step for told in self.data.gather(steps) for name, step in told.items()}
        found = {}
        for name, weight in self._trained.items():
            if name in every:
                moments = mine[weight] if weight in mine else {kind: torch.empty_like(weight) for kind in MOMENTS}
                for kind in MOMENTS:
                    self._spread(moments[kind], self._owners[name], self.data)
                whole = self._whole(name, {kind: moments[kind].detach() for kind in MOMENTS})
                found[name] = {"step": torch.tensor(every[name]), **whole}
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.as_dict()}
        return {"state": found, **scale}


def find_unlike(norms: Sequence[Mapping[str, float]]) -> list[str]:
    """The names of what is not the same on all ranks, but for rounding."""
    least = 1e-6 * max((norm for of_rank in norms for norm in of_rank.values()), default=0.0)
    several = {name: [of_rank.get(name, 0.0) for of_rank in norms] for name in norms[0]}
    return [name for name, of_ranks in several.items() if max(of_ranks) - min(of_ranks) > 1e-3 * max(of_ranks) + least]


def _as_part(value: Tensor, weight: Tensor) -> Tensor:
    """What belongs to a rank's part of a weight, as that part of a whole."""
    if not isinstance(weight, DTensor):
        return value
    part: Tensor = DTensor.from_local(
        value, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return part


def _is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _cut_list(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    for tensor in tensors:
        if some and sum(one.numel() for one in some) + tensor.numel() > BUCKET_NUMBERS:
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some


def _put_back(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
