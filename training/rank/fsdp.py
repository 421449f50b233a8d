"""Fully sharded data parallel (Zhao et al. 2023, arXiv:2304.11277), PyTorch's `fully_shard`: each rank keeps a part of
every weight, its gradient and its moments, and gathers a layer's weights while it computes the layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from training.plan import Plan
from training.rank.data_parallel import DataParallel, gather_each, local_part, put_each
from training.rank.group import Group
from training.rank.model import get_base
from training.rank.quantised import move_scales


class Fsdp(DataParallel):
    """Gradients are averaged, and each rank's part of them kept, after every pass and not after a window's last alone:
    otherwise each rank would hold the gradient of the whole model meanwhile."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        base = get_base(model)
        mesh = init_device_mesh(plan.device, (group.ranks,))
        policy = OffloadPolicy() if plan.offload == "none" else CPUOffloadPolicy(pin_memory=plan.device == "cuda")
        for layer in find_layers(base):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        # What is left, embeddings and head, stays whole from the forward pass to the end of the backward pass: the loss
        # is computed from the head's weights by hand (head.py).
        fully_shard(base, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
        super().__init__(model, plan, group)
        if plan.quantised_parameters:
            move_scales(model, self.device)

    def gather_weights(self) -> dict[str, Tensor]:
        return gather_each(self.model, self.group, self._gather_whole)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        put_each(self.model, weights, lambda own, whole: own.copy_(_cut_like(own, whole)))

    def cast_weights(self, dtype: torch.dtype) -> None:
        buffers = dict(self.model.named_buffers())
        self.model.to(dtype)  # in which `fully_shard` takes part
        for name, buffer in buffers.items():
            holder, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(holder), own, buffer)

    def _find_norm(self, gradients: list[Tensor]) -> Tensor:
        of_parts = super()._find_norm([local_part(gradient) for gradient in gradients])  # all are split
        return self.data.total(of_parts.to(self.device) ** 2).sqrt()

    def _whole(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {
            kind: self._gather_whole(value) if isinstance(value, DTensor) else value for kind, value in moments.items()
        }

    def _own_part(self, name: str, moments: dict[str, Any]) -> dict[str, Any]:
        weight = self._trained[name]
        return {
            kind: _cut_like(weight, value) if isinstance(value, Tensor) and value.shape == weight.shape else value
            for kind, value in moments.items()
        }


def find_layers(base: nn.Module) -> list[nn.Module]:
    """The decoder layers: the longest list of modules of one class."""
    lists = [list(module) for module in base.modules() if isinstance(module, nn.ModuleList) and len(module)]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return max(alike, key=lambda layers: sum(weight.numel() for layer in layers for weight in layer.parameters()))


def _cut_like(own: Tensor, whole: Tensor) -> Tensor:
    """Of a whole tensor, which every rank has, this rank's part."""
    if not isinstance(own, DTensor):
        return whole
    part = distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return part.to(own.device)  # for it goes to the GPU, also where its weight waits on the host
