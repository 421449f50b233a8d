"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: which layers are adapted, and the adapted model."""

import difflib
import re
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from training.errors import SpecError
from training.rank.source import Source
from training.spec import Adapter, Regex

PARAM = "adapter.target_modules"


def make_targets(model: nn.Module, adapter: Adapter) -> list[str]:
    """The names of the adapted layers as peft takes them: last parts (`q_proj`) where these say all, else whole names.

    `all-linear` is every linear layer but the output head, which servers of adapters do not load.

    Raises:
        SpecError: a name or pattern that fits no linear layer.
    """
    linear = list_linear(model)
    asked = adapter.target_modules
    if asked == "all-linear":
        head = model.get_output_embeddings()
        chosen = {name for name, module in linear.items() if module is not head}
    elif isinstance(asked, Regex):
        chosen = {name for name in linear if re.fullmatch(asked.regex, name)}
        if not chosen:
            raise _no_layer(f'the pattern "{asked.regex}" fits no whole name', asked.regex, linear)
    else:
        chosen = set().union(*(_named(name, linear) for name in asked))
    last = {name.rpartition(".")[2] for name in chosen}
    said_by_last = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last if said_by_last == chosen else chosen)


def list_linear(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def count_lora_parameters(model: nn.Module, adapter: Adapter) -> int:
    """r x (inputs + outputs), summed over the adapted layers."""
    targets = tuple(make_targets(model, adapter))
    adapted = [module for name, module in list_linear(model).items() if _fits(name, targets)]
    return adapter.r * sum(sum(module.weight.shape) for module in adapted)


def add_lora(model: nn.Module, adapter: Adapter, source: Source, seed: int) -> nn.Module:
    """The model with adapters around it, in fp32. Their second matrix is zero: the output is still the base's."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=source.name,
        revision=source.revision,
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=make_targets(model, adapter),
        fan_in_fan_out=any(_is_conv1d(module) for module in model.modules()),
    )
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    config.base_model_name_or_path = source.name
    return adapted


def _is_conv1d(module: nn.Module) -> bool:
    """Also what stands in the place of one, quantised: the adapter is for the base as it was published."""
    return isinstance(module, Conv1D) or getattr(module, "source_cls", None) is Conv1D


def _named(name: str, linear: dict[str, Any]) -> set[str]:
    found = {layer for layer in linear if _fits(layer, (name,))}
    if not found:
        raise _no_layer(f'"{name}" fits no linear layer', name, linear)
    return found


def _fits(layer: str, names: tuple[str, ...]) -> bool:
    return layer in names or layer.endswith(tuple(f".{name}" for name in names))


def _no_layer(what: str, asked: str, linear: dict[str, Any]) -> SpecError:
    last = sorted({name.rpartition(".")[2] for name in linear})
    near = difflib.get_close_matches(asked.rpartition(".")[2], last, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the model has {', '.join(last)}"
    return SpecError(f"{PARAM}: {what} of the model; {hint}", param=PARAM)
