"""Which products a forward pass of a model consists of, read from its layers, for the count of FLOPs."""

import re
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from training.adapter import Adapter
from training.facts import Matmuls
from training.rank.adapters import ia3_layers
from training.rank.experts import list_stacks
from training.rank.lora import find_saved_modules, find_targets, list_linear, width_of

BLOCK = re.compile(r".*?\.\d+(?=\.)")
"""The name of a decoder layer at the beginning of the names in it."""
NORM_AFTER = re.compile(r"post_(feedforward|mlp)\w*norm")
"""A norm that takes what the last product of a layer gives, as in Gemma 2 or OLMo 2."""


def count_matmuls(model: Any, adapter: Adapter, arguments: frozenset[str]) -> Matmuls:
    """Counted before it is adapted, also on a model without memory; `arguments` are those that its forward takes.

    Raises:
        SpecError: an option that does not fit the model.
    """
    linear = list_linear(model)
    sizes = _list_products(model)
    head = next((name for name, module in linear.items() if module is model.get_output_embeddings()), None)
    body = {name: size for name, size in sizes.items() if name != head}
    low_rank = find_targets(model, adapter)[0] if adapter.is_low_rank else set()
    ranks = {name: adapter.r * sum(width_of(linear[name])) for name in sizes if name in low_rank}
    stacks = _list_adapted_stacks(model, adapter)
    # Of a stack the sum of weight and adapter has a gradient.
    whole = _list_trained(model, adapter, sizes) | {name.rpartition(".")[0] for name in stacks}
    untouched = set() if _trains_embeddings(model, adapter) else _find_untouched(sizes, head, _adapted(model, adapter))
    last = {name for name in _find_last(model, body) if name in linear}
    attention = _attention_width(model.config.get_text_config())
    in_head = ranks.pop(head, 0) if head is not None else 0  # goes where the head goes: over the labelled places
    return Matmuls(
        body=sum(body.values()),
        head=(sizes[head] if head is not None else 0) + in_head,
        head_everywhere="logits_to_keep" not in arguments,
        attention=attention,
        adapter=sum(ranks.values()),
        adapter_norms=sum(_norm_products(linear[name], adapter) for name in low_rank) if adapter.use_dora else 0,
        adapter_sums=sum(adapter.r * stack.numel() for stack in stacks.values()),
        trained_body=sum(size for name, size in body.items() if name in whole),
        trained_head=(sizes[head] if head in whole else 0) + in_head if head is not None else 0,
        untouched=sum(body[name] + _first_matrix(linear, name, ranks, adapter) for name in untouched if name in body),
        untouched_attention=round(attention * _untouched_share(body, untouched)),
        not_again=sum(_spared(linear[name], name in ranks, body[name], adapter) for name in last),
    )


def _list_products(model: nn.Module) -> dict[str, int]:
    """By the name of each module that multiplies, in their order: the weights that one token meets there."""
    found: dict[str, int] = {}
    text = model.config.get_text_config()  # type: ignore[union-attr]
    experts = next((count for name in _EXPERTS if (count := getattr(text, name, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            found[name] = module.weight.numel()
        elif experts and chosen and not isinstance(module, nn.Embedding):
            # A router has a row for each expert; experts have a matrix each, and a token meets the chosen ones.
            own = [weight for weight in module.parameters(recurse=False) if weight.shape[0] == experts]
            size = sum(weight.numel() for weight in own if weight.dim() == 2)
            size += sum(weight.numel() * chosen // experts for weight in own if weight.dim() == 3)
            if size:
                found[name] = size
    return found


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _adapted(model: nn.Module, adapter: Adapter) -> set[str]:
    """The modules whose result depends on something trained, whatever stands before them."""
    linear = list_linear(model)
    match adapter.type:
        case "lora" | "qlora":
            saved = tuple(find_saved_modules(model, adapter))
            layers, stacks = find_targets(model, adapter)
            layers |= {name.rpartition(".")[0] for name in stacks}
            return layers | {name for name in linear if _inside(name, saved)}
        case "ia3":
            return set(ia3_layers(model, adapter))
        case _:
            # A prefix stands beside the first keys and values.
            return set(linear)


def _list_trained(model: nn.Module, adapter: Adapter, sizes: dict[str, int]) -> set[str]:
    if adapter.type == "full":
        return set(sizes)
    saved = tuple(find_saved_modules(model, adapter)) if adapter.is_low_rank else ()
    return {name for name in sizes if _inside(name, saved)}


def _list_adapted_stacks(model: nn.Module, adapter: Adapter) -> dict[str, nn.Parameter]:
    chosen = find_targets(model, adapter)[1] if adapter.is_low_rank else set()
    return {name: stack for name, stack in list_stacks(model).items() if name in chosen}


def _trains_embeddings(model: Any, adapter: Adapter) -> bool:
    if adapter.type in ("full", "prompt"):
        return True
    saved = find_saved_modules(model, adapter) if adapter.is_low_rank else []
    embedding = model.get_input_embeddings().weight
    return any(weight is embedding for name in saved for weight in model.get_submodule(name).parameters())


def _find_untouched(sizes: dict[str, int], head: str | None, adapted: set[str]) -> set[str]:
    """Those before the first adapted one, that one itself, and those beside it that take the same input: in a module
    all but the last product, such as queries, keys and values, or gate and up."""
    order = [name for name in sizes if name != head] + ([head] if head is not None else [])
    first = next(place for place, name in enumerate(order) if name in adapted)
    beside = [name for name in order if _holder(name) == _holder(order[first])]
    if order[first] != beside[-1]:
        beside.pop()
    return {*order[: first + 1], *beside}


def _untouched_share(body: dict[str, int], untouched: set[str]) -> float:
    """Of the attention modules those that lie below everything trained."""
    modules = {_holder(name) for name in body if "att" in _holder(name).rpartition(".")[2]}
    touched = {_holder(name) for name in body if name not in untouched}
    return len(modules - touched) / len(modules) if modules else 0.0


def _find_last(model: nn.Module, body: dict[str, int]) -> set[str]:
    """The last product of each decoder layer."""
    if any(NORM_AFTER.search(name) for name, _ in model.named_modules()):
        return set()
    return set({match[0]: name for name in body if (match := BLOCK.match(name))}.values())


def _spared(module: Any, is_adapted: bool, size: int, adapter: Adapter) -> int:
    """Of an adapted layer only the adapter's second matrix comes last; DoRA needs its result, and our own layer
    (low_rank.py) computes all at once."""
    if not is_adapted:
        return size
    at_once = type(module) is nn.Linear and adapter.type == "lora" and not adapter.dropout
    return 0 if adapter.use_dora or at_once else adapter.r * width_of(module)[1]


def _first_matrix(linear: dict[str, Any], name: str, ranks: dict[str, int], adapter: Adapter) -> int:
    return adapter.r * width_of(linear[name])[0] if name in ranks else 0


def _norm_products(module: Any, adapter: Adapter) -> int:
    """The adapter's two matrices multiplied, by way of an identity matrix as peft does it."""
    inputs, outputs = width_of(module)
    return adapter.r * inputs * (inputs + outputs)


def _attention_width(text: Any) -> int:
    kinds = getattr(text, "layer_types", None)
    layers = list(text.per_layer_config)
    if kinds:
        kept = ["attention" in kind and "linear" not in kind for kind in kinds]
        layers = [layer for layer, attends in zip(layers, kept, strict=False) if attends]
    return sum(map(_heads_width, layers))


def _heads_width(layer: Any) -> int:
    heads = getattr(layer, "num_attention_heads", None)
    if not heads:
        return 0
    return int(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads))


def _holder(name: str) -> str:
    return name.rpartition(".")[0]


def _inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
