"""Low-rank adapters on mixtures of experts, whose weights lie in stacks: one tensor for all experts of a layer.

They are no linear layers, so peft takes them as `target_parameters`. A stack is adapted expert by expert, each with
matrices of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from training.adapter import Adapter
from training.errors import SpecError


@dataclass(frozen=True)
class Targets:
    """The names of what is adapted as peft takes them: last parts (`q_proj`) where these say all, else whole names."""

    modules: list[str]
    parameters: list[str]


def list_stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    """The stacks (experts, ., .) of a model by their whole names; none where it is no mixture of experts."""
    return {
        f"{holder}.{name}": weight
        for holder, module in model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and getattr(module, "num_experts", None) == len(weight)
    }


def list_split(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module of experts that have a part for each of them, by their own names: stacks, and biases
    beside them. None in other modules."""
    own = {
        name: weight
        for name, weight in module.named_parameters(recurse=False)
        if getattr(module, "num_experts", None) == len(weight)
    }
    return own if any(weight.ndim == 3 for weight in own.values()) else {}


def count_experts(model: Any) -> tuple[int, int]:
    """How many experts each layer has, and the weights of all. The first is 0 where transformers has no plan for the
    family by which tokens are sent to experts elsewhere."""
    holders = {name: module for name, module in model.named_modules() if list_split(module)}
    plan = model.config.get_text_config().base_model_ep_plan or {}
    reached = [f"*.{pattern}" for pattern, style in plan.items() if style == "ep_dispatch_experts"]
    numbers = {
        int(module.num_experts) if any(fnmatchcase(name, pattern) for pattern in reached) else 0
        for name, module in holders.items()
    }
    weights = sum(weight.numel() for module in holders.values() for weight in list_split(module).values())
    return numbers.pop() if len(numbers) == 1 else 0, weights


def name_targets(model: nn.Module, layers: set[str], stacks: set[str]) -> Targets:
    """`layers` and `stacks` are whole names.

    Where a family had a layer for each expert before transformers 5, peft takes the names of these layers (`down_proj`)
    for the stacks, also where a dense layer or a shared expert has the same name. Such a layer is named by its weight,
    which makes the same adapter.
    """
    as_weights = _find_renamed(model, layers)
    modules = {name for name, _ in model.named_modules()}
    weights = {name for name, _ in model.named_parameters()}
    return Targets(
        _shorten(layers - as_weights, modules, 1),
        _shorten(stacks, weights, 2) + _shorten({f"{name}.weight" for name in as_weights}, weights, 3),
    )


def check_options(model: nn.Module, adapter: Adapter, layers: set[str], stacks: set[str]) -> None:
    """Raises SpecError for an option that what peft takes by its weight cannot have."""
    as_weights = [*stacks, *_find_renamed(model, layers)]
    if not as_weights:
        return
    what = f"{min(as_weights)} belongs to a mixture of experts"
    hint = "leave the option out, or choose layers without it in adapter.target_modules"
    plain = Adapter()
    for option in ("dropout", "use_dora", "init"):
        if getattr(adapter, option) != getattr(plain, option):
            raise SpecError(f"adapter.{option}: {what}, which cannot have it; {hint}", param=f"adapter.{option}")
    quantised = [name for name in as_weights if name not in stacks]
    if adapter.type == "qlora" and quantised:
        message = f"adapter.type: {min(quantised)} would be quantised, and peft then takes it for a stack of experts"
        raise SpecError(f"{message}; leave it out of adapter.target_modules", param="adapter.type")


def _find_renamed(model: nn.Module, layers: set[str]) -> set[str]:
    """The layers whose names peft takes for stacks; only where there are any, for each takes milliseconds."""
    return {name for name in layers if _means_stacks(model, name)} if list_stacks(model) else set()


def _means_stacks(model: nn.Module, name: str) -> bool:
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config: Any = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # one of two names that it would take together
        return True
    return name not in config.target_modules


def _shorten(names: set[str], everything: Iterable[str], parts: int) -> list[str]:
    short = {".".join(name.split(".")[-parts:]) for name in names}
    fitting = {name for name in everything if ".".join(name.split(".")[-parts:]) in short}
    return sorted(short if fitting == names else names)
