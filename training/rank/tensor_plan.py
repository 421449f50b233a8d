"""Which matrices of a model may be split among ranks, by the plan that transformers has for its family."""

import math
import re
from collections.abc import Mapping
from typing import Any

BY_OUTPUTS = {"colwise", "colwise_gather_output"}
BY_INPUTS = {"rowwise", "rowwise_split_input"}
PACKED = "packed_colwise"
"""Two matrices by their outputs, which lie in one."""
SPLITTING = {*BY_OUTPUTS, *BY_INPUTS, PACKED, "embedding_rowwise"}
"""Ways of splitting a weight, as transformers names them."""
PARTIAL = "replicated_with_grad_allreduce"
"""A weight that is whole on all ranks, each of which uses it for its own heads."""
STYLES = {*SPLITTING, PARTIAL, "moe_tp_experts"}
"""What plans are made of that are known to be right in training."""


def style_of(name: str, plan: Mapping[str, str] | None) -> str | None:
    """What a plan says of a weight: of itself, or else of its module."""
    name = any_layer(name)
    return (plan or {}).get(name) or (plan or {}).get(name.rpartition(".")[0])


def any_layer(name: str) -> str:
    """As plans name it, for all layers at once."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def find_sizes(model: Any) -> tuple[int, int]:
    """Among how many ranks a model may be split: as many as divide the first number, which is 1 where there is no plan
    for its layers; and how many of its parameters are whole on all of them. Read without memory (meta device)."""
    plan = model.tp_plan
    split = {name: weight for name, weight in model.named_parameters() if style_of(name, plan) in SPLITTING}
    whole = sum(weight.numel() for weight in model.parameters()) - sum(weight.numel() for weight in split.values())
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    layers = [name for name in split if model.get_submodule(name.rpartition(".")[0]) not in ends]
    if not layers or not set(plan.values()) <= STYLES:
        return 1, whole
    return math.gcd(*(_units(model, name, style_of(name, plan)) for name in layers)), whole


def _units(model: Any, name: str, style: str | None) -> int:
    """Of what a weight is split in: its rows, columns or, in attention, heads."""
    weight, holder = model.get_parameter(name), name.rpartition(".")[0]
    if style == PACKED:
        return weight.shape[max(-2, -weight.ndim)] // 2
    is_bias = weight.ndim == 1
    if style in BY_INPUTS and is_bias:
        return 0  # whole
    width: int = weight.shape[-1 if style in BY_INPUTS or is_bias else -2]
    if style not in ("colwise", "rowwise") or not re.search(r"attn|attention", holder):
        return width
    size = getattr(model.get_submodule(holder.rpartition(".")[0]), "head_dim", None)
    if isinstance(size, int):
        return width // size
    text = model.config.get_text_config()
    return math.gcd(text.num_attention_heads, getattr(text, "num_key_value_heads", None) or 0)
