"""Expert parallel (Lepikhin et al. 2020, arXiv:2006.16668): the experts of each layer are split among data-parallel
ranks. In every pass each token is sent to the ranks that keep its experts, and their results are sent back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

from training.plan import Plan
from training.rank.data_parallel import DataParallel, fill_gradients, gather_each, put_each
from training.rank.experts import list_split
from training.rank.group import Group, Ranks
from training.rank.mesh import make_expert_mesh
from training.rank.parallel import SingleDevice


@dataclass(frozen=True)
class Cut:
    """How a weight is split by experts: its axis `axis` is one of (experts, numbers of each) or the other way round,
    `sizes`, of which the number of experts is given as -1."""

    axis: int
    sizes: tuple[int, int]

    def take(self, whole: Tensor, part: int, parts: int) -> Tensor:
        seen = whole.unflatten(self.axis, self.sizes)
        return seen.chunk(parts, self._of_experts)[part].flatten(self.axis, self.axis + 1).clone()

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        seen = [part.unflatten(self.axis, self.sizes) for part in parts]
        return torch.cat(seen, self._of_experts).flatten(self.axis, self.axis + 1)

    @property
    def _of_experts(self) -> int:
        return self.axis + self.sizes.index(-1)


class ExpertParallel(DataParallel):
    """A gradient is summed over the ranks that keep the weight. Of what is no expert these are all; of an expert those
    with a copy of it: each has the gradient of all tokens that were sent to it already, from whichever rank."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        mesh = make_expert_mesh(plan)
        self._experts, self._copies = (Ranks(mesh[axis].get_group()) for axis in ("expert", "copies"))
        self._cuts = find_cuts(model)
        _send_tokens(model, mesh, self._experts.ranks)
        for weight, cut in self._cuts.items():
            weight.data = cut.take(weight.data, self._experts.rank, self._experts.ranks)
        super().__init__(model.to(plan.device), plan, group)
        for weight in self._trained.values():
            dist.broadcast(weight.data, group=self._keepers(weight), group_src=0)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        SingleDevice.backward(self, loss, last=last)  # gradients are summed, not averaged
        if last:
            self._sum_gradients()

    def gather_weights(self) -> dict[str, Tensor]:
        return gather_each(self.model, self.group, lambda weight: self._gather(weight.detach(), self._cuts.get(weight)))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        put_each(self.model, weights, lambda own, whole: own.copy_(self._cut_like(own, whole)))

    def _sum_gradients(self) -> None:
        for weight in fill_gradients(list(self._trained.values()), self.group):
            if weight not in self._cuts or self._copies.ranks > 1:
                dist.all_reduce(weight.grad, group=self._keepers(weight))

    def _keepers(self, weight: Tensor) -> dist.ProcessGroup | None:
        return self._copies.members if weight in self._cuts else None

    def _find_norm(self, gradients: list[Tensor]) -> Tensor:
        """Each expert counts once, wherever it is and however often."""
        split = {weight.grad for weight in self._cuts}
        of_own = super()._find_norm([gradient for gradient in gradients if gradient in split])
        of_rest = super()._find_norm([gradient for gradient in gradients if gradient not in split])
        return (of_rest**2 + self.group.total(of_own**2) / self._copies.ranks).sqrt()

    def _gather(self, part: Tensor, cut: Cut | None) -> Tensor:
        """The whole of a tensor, on rank 0."""
        if cut is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self._experts.ranks)] if self._experts.rank == 0 else []
        dist.gather(part, parts or None, group=self._experts.members, group_dst=0)
        return self._keep(cut.join(parts) if self.group.rank == 0 else part)

    def _cut_like(self, own: Tensor, whole: Tensor) -> Tensor:
        cut = self._cuts.get(own)
        return whole if cut is None else cut.take(whole, self._experts.rank, self._experts.ranks)

    def _whole(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:
        cut = self._cuts.get(self._trained[name])
        return {kind: self._gather(value, cut) if value.ndim else value for kind, value in moments.items()}

    def _own_part(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:
        weight = self._trained[name]
        return {kind: self._cut_like(weight, value) if value.ndim else value for kind, value in moments.items()}


def find_cuts(model: nn.Module) -> dict[Tensor, Cut]:
    """How each weight of a whole model lies that is split: those of experts, and of their adapters."""
    cuts: dict[Tensor, Cut] = {}
    for module in model.modules():
        cuts |= {weight: Cut(0, (-1, 1)) for weight in list_split(module).values()}
    for adapted in _list_adapted(model):
        for name, r in adapted.r.items():
            cuts[adapted.lora_A[name].weight] = Cut(0, (-1, r))
            cuts[adapted.lora_B[name].weight] = Cut(1, (r, -1))
    return cuts


def _list_adapted(model: nn.Module) -> Sequence[Any]:
    """What peft puts around experts for each of their stacks that is adapted."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora.layer import ParamWrapper

    return [
        module
        for module in model.modules()
        if isinstance(module, ParamWrapper) and module.parameter_name in list_split(module.get_base_layer())
    ]


def _send_tokens(model: nn.Module, mesh: Any, ranks: int) -> None:
    """Have modules of experts take the tokens of all ranks; they count the experts of this rank alone from then on."""
    experts: list[Any] = [module for module in model.modules() if list_split(module)]
    for module in [*experts, *_list_adapted(model)]:
        module.num_experts //= ranks
    for module in experts:
        EpDispatchExpertsParallel().install_forward(
            module, mesh["expert"], tp_mesh=mesh["tensor"], ep_implementation="all_to_all"
        )
