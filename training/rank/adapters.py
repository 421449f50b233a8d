"""Which kind of adapter a job has, through peft; lora.py has the low-rank ones, here are the smaller ones."""

from typing import Any

import torch
from torch import nn

from training.adapter import Adapter
from training.errors import SpecError
from training.rank.experts import list_split
from training.rank.lora import (
    add_lora,
    count_lora_parameters,
    count_of_stacks,
    find_layers,
    find_saved_modules,
    find_targets,
    is_conv1d,
    list_linear,
    width_of,
)
from training.rank.source import Source

IA3_LAYERS = (
    *("k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"),
    *("down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2", "w2"),
)
"""Keys, values and the second layer of the feed-forward part (Liu et al. 2022, section 3.3), as families name them."""


def count_trained(model: nn.Module, adapter: Adapter) -> int:
    """What would be trained of a model; counted before it is adapted.

    Raises:
        SpecError: an option that does not fit the model.
    """
    match adapter.type:
        case "full":
            return sum(weight.numel() for weight in model.parameters())
        case "ia3":
            linear = list_linear(model)
            layers = ia3_layers(model, adapter)
            return sum(width_of(linear[name])[0 if inner else 1] for name, inner in layers.items())
        case "prompt":
            return adapter.num_virtual_tokens * model.get_input_embeddings().weight.shape[1]
        case "prefix":
            text = model.config.get_text_config()
            return adapter.num_virtual_tokens * text.num_hidden_layers * 2 * _prefix_width(text)
        case _:
            return count_lora_parameters(model, adapter)


def count_trained_experts(model: nn.Module, adapter: Adapter) -> int:
    """As above, of what belongs to one of the experts of a layer."""
    if adapter.type != "full" and not adapter.is_low_rank:
        return 0
    saved = [""] if adapter.type == "full" else find_saved_modules(model, adapter)
    holders = {module for name in saved for module in model.get_submodule(name).modules()}
    whole = sum(weight.numel() for module in holders for weight in list_split(module).values())
    return whole if adapter.type == "full" else whole + count_of_stacks(model, adapter, find_targets(model, adapter)[1])


def _prefix_width(text: Any) -> int:
    """Of the keys of a token in each layer. Raises SpecError where there are none, or layers of several widths."""
    widths = set()
    for layer in text.per_layer_config:
        heads = getattr(layer, "num_attention_heads", None)
        held = getattr(layer, "num_key_value_heads", None) or heads
        widths.add(held * (layer.hidden_size // heads) if heads else None)
    width = next(iter(widths))
    if width is None or len(widths) > 1:
        what = "has no attention" if width is None else "has layers of several widths"
        message = f'adapter.type: {text.model_type} {what}, and a prefix is keys and values; set it to "lora"'
        raise SpecError(message, param="adapter.type")
    return int(width)


def add_adapter(model: nn.Module, adapter: Adapter, source: Source, seed: int) -> nn.Module:
    """The model with what is trained around it, in fp32."""
    from peft import get_peft_model

    if adapter.is_low_rank:
        return add_lora(model, adapter, source, seed)
    config = _make_config(model, adapter)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config)
    config.base_model_name_or_path, config.revision = source.name, source.revision
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return adapted


def prompt_tokens(model: nn.Module) -> int:
    """How many places a trained prompt takes in the sequence that the model gives logits for."""
    config = getattr(model, "peft_config", {}).get("default")
    return config.num_virtual_tokens if config is not None and config.peft_type == "PROMPT_TUNING" else 0


def _make_config(model: nn.Module, adapter: Adapter) -> Any:
    from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig

    if adapter.type == "prefix":
        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=adapter.num_virtual_tokens)
    if adapter.type == "prompt":
        has_heads = hasattr(model.config.get_text_config(), "num_attention_heads")
        return PromptTuningConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=adapter.num_virtual_tokens,
            # Words drawn from the vocabulary: random embeddings have another scale than the model knows.
            prompt_tuning_init="SAMPLE_VOCAB",
            num_attention_heads=None if has_heads else 1,  # peft asks for them, and a prompt has none
        )
    layers = ia3_layers(model, adapter)
    return IA3Config(
        task_type="CAUSAL_LM",
        target_modules=sorted(layers),
        feedforward_modules=sorted(name for name, inner in layers.items() if inner),
        fan_in_fan_out=any(is_conv1d(module) for module in model.modules()),
    )


def ia3_layers(model: nn.Module, adapter: Adapter) -> dict[str, bool]:
    """The adapted layers; whether each takes the inside of the feed-forward part, which is scaled before it."""
    linear = list_linear(model)
    if "target_modules" in adapter.model_fields_set:
        chosen = find_layers(model, adapter)
    else:
        chosen = {name for name in linear if name.endswith(tuple(f".{last}" for last in IA3_LAYERS))}
    if not chosen:
        last = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        param = "adapter.target_modules"
        message = f"{param}: which layers IA3 adapts is not known for {model.config.model_type}; name some of {last}"
        raise SpecError(message, param=param)
    hidden = model.config.get_text_config().hidden_size
    return {name: width_of(linear[name])[0] > hidden == width_of(linear[name])[1] for name in chosen}
