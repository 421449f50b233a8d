"""A model cut for ranks that compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053)."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.sharding_utils import DtensorShardOperation

from training.errors import ModelError, SpecError
from training.rank.model import get_base
from training.rank.tensor_plan import BY_INPUTS, BY_OUTPUTS, PARTIAL, SPLITTING, any_layer, style_of


def cut(model: nn.Module, ranks: DeviceMesh, device: torch.device) -> None:
    """Leave of each matrix this rank's part, on its device, and have the ranks exchange what that takes. Before, the
    model is whole on the host, with its adapters, and the same on all ranks.

    Raises:
        SpecError: a tied head is to be trained whole beside an adapter.
        ModelError: a weight stands in two places that are split otherwise.
    """
    base: Any = get_base(model)
    plan = base.tp_plan
    tied = _list_tied(model)
    if any("modules_to_save" in name for names in tied for name in names):
        param = "adapter.modules_to_save"
        message = f'{param}: a head that is tied to the embeddings is not split when it is saved; "fsdp" trains it'
        raise SpecError(f"{message}, with parallelism.tensor left out", param=param)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(base.named_modules()):
        for part, style in _list_parts(module, plan.get(any_layer(name))):
            for own, weight in list(part.named_parameters(recurse=False)):
                of_weight = style_of(f"{name}.{own}", plan) if part is module else style
                if of_weight in SPLITTING:
                    if weight not in made:  # one that stands in two places stays one
                        made[weight] = _cut(part, own, of_weight, ranks, device)
                    part.register_parameter(own, made[weight])
            if style == PARTIAL:
                _sum_gradients(part, ranks)
            elif style is not None:
                ALL_PARALLEL_STYLES[style].install_forward(part, ranks)
    model.to(device)
    if _list_tied(model) != tied:
        message = "the model uses one weight in two places that its plan splits otherwise; leave parallelism.tensor out"
        raise ModelError(message, param="parallelism.tensor")


def cut_like(own: Tensor, whole: Tensor) -> Tensor:
    """Of a whole tensor, which every rank has, the part that this one has of `own`."""
    if not isinstance(own, DTensor):
        return whole
    part = cast(Tensor, DtensorShardOperation(own).shard_tensor(whole, device=whole.device, dtype=whole.dtype))
    # Copied: a slice would keep the whole in memory, and the optimizer takes no columns of it.
    return part.clone(memory_format=torch.contiguous_format)


def cast_parts(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights only, as `cast_weights`: those that are parts do not take another type in their place."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in made:
                made[weight] = nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
            module.register_parameter(name, made[weight])


def is_cut(weight: Tensor) -> bool:
    """Whether other ranks have other parts of it."""
    return isinstance(weight, DTensor) and not all(place.is_replicate() for place in weight.placements)


def _list_parts(module: nn.Module, style: str | None) -> Iterator[tuple[nn.Module, str | None]]:
    """Of a module, or of what an adapter has put in its place, the modules with weights, and how each is split."""
    if isinstance(module, LoraLayer):
        yield module.base_layer, style
        if style in BY_OUTPUTS:
            yield from ((second, style) for second in module.lora_B.values())
        if style in BY_INPUTS:
            yield from ((first, style) for first in module.lora_A.values())
    elif isinstance(module, ModulesToSaveWrapper):
        yield from ((inner, style) for inner in (module.original_module, *module.modules_to_save.values()))
    else:
        yield module, style


def _cut(holder: nn.Module, name: str, style: str, ranks: DeviceMesh, device: torch.device) -> nn.Parameter:
    whole = holder.get_parameter(name)
    holder.register_parameter(name, nn.Parameter(whole.detach().to("meta"), requires_grad=whole.requires_grad))
    ALL_PARALLEL_STYLES[style].shard_param(holder, name, ranks)
    shape = holder.get_parameter(name)
    part = cut_like(shape, whole.detach()).to(device)
    made = DTensor.from_local(
        part, ranks, shape.placements, run_check=False, shape=shape.shape, stride=tuple(shape.stride())
    )
    return nn.Parameter(made, requires_grad=whole.requires_grad)


def _sum_gradients(module: nn.Module, ranks: DeviceMesh) -> None:
    """Each rank has the gradient of its own heads. Pass by pass: what is on a weight already is summed."""

    def total(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ranks.get_group())
        return gradient

    for weight in module.parameters():
        if weight.requires_grad:
            weight.register_hook(total)


def _list_tied(model: nn.Module) -> list[list[str]]:
    """The names of weights that stand in several places."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        places.setdefault(weight, []).append(name)
    return [names for names in places.values() if len(names) > 1]
