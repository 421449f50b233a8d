"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: which layers are adapted, and the adapted model."""

import difflib
import re
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from training.adapter import Adapter, Regex
from training.errors import SpecError
from training.rank.adaptable import find_unfit, require_loadable
from training.rank.experts import Targets, check_options, list_stacks, name_targets
from training.rank.source import Source

PARAM = "adapter.target_modules"
SAVED = "adapter.modules_to_save"


def make_targets(model: nn.Module, adapter: Adapter) -> Targets:
    """What is adapted, as peft takes it; raises as `find_targets`."""
    return name_targets(model, *find_targets(model, adapter))


def find_targets(model: nn.Module, adapter: Adapter) -> tuple[set[str], set[str]]:
    """The whole names of the linear layers and of the stacks of experts (experts.py) that `target_modules` asks for.

    `all-linear` is all of them that peft can adapt but the output head, which servers of adapters do not load.

    Raises:
        SpecError: a name or pattern that fits none, or one that cannot be adapted.
    """
    stacks = list_stacks(model)
    chosen = _choose(model, adapter, {**list_linear(model), **stacks})
    unfit = find_unfit(model, chosen - stacks.keys())
    if unfit and adapter.target_modules != "all-linear":
        name = min(unfit)
        raise SpecError(f"{PARAM}: {name} cannot be adapted: {unfit[name]}; leave it out", param=PARAM)
    chosen -= unfit.keys()
    if not chosen:
        message = f'adapter.type: {model.config.model_type} has no layer that can be adapted; set it to "full"'
        raise SpecError(message, param="adapter.type")
    return chosen - stacks.keys(), chosen & stacks.keys()


def find_layers(model: nn.Module, adapter: Adapter) -> set[str]:
    """As `find_targets`, of the linear layers alone."""
    return _choose(model, adapter, list_linear(model))


def _choose(model: nn.Module, adapter: Adapter, linear: dict[str, Any]) -> set[str]:
    asked = adapter.target_modules
    if asked == "all-linear":
        head = model.get_output_embeddings()
        saved = set(find_saved_modules(model, adapter))
        return {name for name, module in linear.items() if module is not head and name not in saved}
    if isinstance(asked, Regex):
        chosen = {name for name in linear if re.fullmatch(asked.regex, name)}
        if not chosen:
            raise _no_layer(f'the pattern "{asked.regex}" fits no whole name', asked.regex, linear)
        return chosen
    return set().union(*(_named(name, linear) for name in asked))


def list_linear(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if _is_linear(module)}


def _is_linear(module: nn.Module) -> bool:
    """Whether it gives the product that its weight tells. Routers of experts that are made of a linear layer (Llama 4,
    Phi-3.5-MoE) give choices and layers in groups (DeepSeek V4) several products, to which peft cannot add."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    if not type(module).__module__.startswith("transformers.models."):
        return True
    inputs, outputs = width_of(module)
    try:
        with torch.no_grad():
            given = module(torch.zeros(1, 1, inputs, dtype=module.weight.dtype, device=module.weight.device))
    except (RuntimeError, ValueError, TypeError):
        return False
    return isinstance(given, torch.Tensor) and given.shape == (1, 1, outputs)


def is_conv1d(module: nn.Module) -> bool:
    """Also what stands in the place of one, quantised: the adapter is for the base as it was published."""
    return isinstance(module, Conv1D) or getattr(module, "source_cls", None) is Conv1D


def width_of(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    first, second = module.weight.shape
    return (first, second) if isinstance(module, Conv1D) else (second, first)


def count_lora_parameters(model: nn.Module, adapter: Adapter) -> int:
    """r x (inputs + outputs) of the adapted layers and experts, with DoRA a length for each output, and what is
    trained whole."""
    linear = list_linear(model)
    layers, stacks = find_targets(model, adapter)
    adapted = {name: linear[name] for name in layers}
    _check_choice(model, adapter, adapted)
    check_options(model, adapter, layers, stacks)
    low_rank = adapter.r * sum(sum(module.weight.shape) for module in adapted.values())
    low_rank += count_of_stacks(model, adapter, stacks)
    lengths = sum(width_of(module)[1] for module in adapted.values()) if adapter.use_dora else 0
    saved = [model.get_submodule(name) for name in find_saved_modules(model, adapter)]
    # By identity: tied weights are trained once.
    whole = {weight: weight.numel() for module in saved for weight in module.parameters()}
    return low_rank + lengths + sum(whole.values())


def count_of_stacks(model: nn.Module, adapter: Adapter, stacks: set[str]) -> int:
    adapted = (weight for name, weight in list_stacks(model).items() if name in stacks)
    return adapter.r * sum(len(weight) * sum(weight.shape[1:]) for weight in adapted)


def find_saved_modules(model: nn.Module, adapter: Adapter) -> list[str]:
    """The whole names of `modules_to_save`.

    Raises:
        SpecError: a name that fits no module with weights.
    """
    holders = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    found: set[str] = set()
    for asked in adapter.modules_to_save:
        fitting = {name for name in holders if _fits(name, (asked,))}
        if not fitting:
            last = sorted({name.rpartition(".")[2] for name in holders if not name.rpartition(".")[2].isdigit()})
            near = difflib.get_close_matches(asked.rpartition(".")[2], last, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the model has {', '.join(last)}"
            raise SpecError(f'{SAVED}: "{asked}" fits no module of the model; {hint}', param=SAVED)
        found |= fitting
    return sorted(found)


def add_lora(model: nn.Module, adapter: Adapter, source: Source, seed: int) -> nn.Module:
    """The model with adapters around it, in fp32. Their second matrix is zero, or what they add was taken out of the
    weights: the output is still the base's."""
    from peft import LoraConfig, get_peft_model

    saved = find_saved_modules(model, adapter)
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    targets = make_targets(model, adapter)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=source.name,
        revision=source.revision,
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        modules_to_save=saved or None,
        ensure_weight_tying=tied and any(_is_embedding(model, name) for name in saved),
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        init_lora_weights="pissa" if adapter.init == "pissa" else True,
        fan_in_fan_out=any(is_conv1d(module) for module in model.modules()),
    )
    if adapter.type == "lora":
        from training.rank.low_rank import LowRankLinear

        config._register_custom_module({torch.nn.Linear: LowRankLinear})
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    config.base_model_name_or_path = source.name
    for weight in adapted.parameters():
        if weight.requires_grad:  # modules trained whole are copied in the type of the frozen ones
            weight.data = weight.data.float()
    require_loadable(adapted)
    return adapted


def _check_choice(model: nn.Module, adapter: Adapter, adapted: dict[str, Any]) -> None:
    """Raises SpecError where options do not go together on this model."""
    saved = find_saved_modules(model, adapter)
    both = sorted(set(saved) & set(adapted))
    if both:
        raise SpecError(f"{SAVED}: {both[0]} stands in target_modules as well; leave it out of one", param=SAVED)
    head = model.get_output_embeddings()
    quantised = {name for name, module in list_linear(model).items() if module is not head}
    inside = [name for name in saved for layer in quantised if layer == name or layer.startswith(f"{name}.")]
    if adapter.type == "qlora" and inside:
        message = f"{SAVED}: {inside[0]} is quantised and cannot be trained whole; name it in target_modules"
        raise SpecError(message, param=SAVED)
    narrowest = min((min(module.weight.shape) for module in adapted.values()), default=adapter.r)
    if adapter.init == "pissa" and adapter.r > narrowest:
        message = f"adapter.r: {adapter.r} is more than PiSSA can take from a layer of width {narrowest}"
        raise SpecError(message, param="adapter.r")


def _is_embedding(model: nn.Module, name: str) -> bool:
    return model.get_submodule(name) in (model.get_input_embeddings(), model.get_output_embeddings())


def _named(name: str, linear: dict[str, Any]) -> set[str]:
    found = {layer for layer in linear if _fits(layer, (name,))}
    if not found:
        raise _no_layer(f'"{name}" fits no linear layer', name, linear)
    return found


def _fits(layer: str, names: tuple[str, ...]) -> bool:
    return layer in names or layer.endswith(tuple(f".{name}" for name in names))


def _no_layer(what: str, asked: str, linear: dict[str, Any]) -> SpecError:
    last = sorted({name.rpartition(".")[2] for name in linear})
    name = asked.rpartition(".")[2]
    fused = [longer for longer in last if longer.endswith(f"_{name}")]  # `gate_up_proj` holds what was `up_proj`
    near = fused or difflib.get_close_matches(name, last, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the model has {', '.join(last)}"
    return SpecError(f"{PARAM}: {what} of the model; {hint}", param=PARAM)
