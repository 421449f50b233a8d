"""The base model: its tokenizer, the facts that the plan needs, and the weights in their types, ready to train."""

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.adapter import Adapter
from training.devices import SHARDS_WEIGHTS
from training.errors import ModelError, SpecError
from training.facts import ModelFacts
from training.plan import Plan
from training.rank.adapters import add_adapter, count_trained, count_trained_experts
from training.rank.attention import use_rows
from training.rank.experts import count_experts, list_stacks
from training.rank.lora import find_targets
from training.rank.matmuls import count_matmuls
from training.rank.offloading import Offloading
from training.rank.pissa import remember_start
from training.rank.quantised import count_quantised, make_quantization, make_trainable
from training.rank.source import Source
from training.rank.tensor_plan import find_sizes

CHANGERS_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "mup_logits_scale")
"""Names in a config that say that something is done to the logits after the output head."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ATTENTION = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}
"""The names that transformers has for them."""


def load_tokenizer(source: Source) -> Any:
    """Raises ModelError where the folder holds none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever their parsers trip over
        raise _unfit(source, "its tokenizer cannot be loaded", error) from error


def load_config(source: Source) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise _unfit(source, "its config.json cannot be used", error) from error


def context_tokens(config: Any) -> int | None:
    """The longest sequence that the model was made for; None where its kind has no such limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def make_facts(source: Source, config: Any, adapter: Adapter) -> ModelFacts:
    """Counted on a model without memory (torch's meta device).

    Raises:
        ModelError: not a causal language model.
        SpecError: `adapter.target_modules` names no linear layer.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as above
        raise _unfit(source, "not a causal language model", error) from error
    text = config.get_text_config()
    parameters = sum(weight.numel() for weight in model.parameters())
    tensor_units, whole_parameters = find_sizes(model)
    experts, of_experts = count_experts(model)
    return ModelFacts(
        family=config.model_type,
        hidden_size=text.hidden_size,
        intermediate_size=max(map(_computed_width, text.per_layer_config)),
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        parameters=parameters,
        trained_parameters=count_trained(model, adapter),
        quantised_parameters=count_quantised(model) if adapter.type == "qlora" else 0,
        head_in_parts=not any(getattr(text, name, None) for name in CHANGERS_OF_LOGITS),
        context_tokens=context_tokens(config),
        attention_heads=max(getattr(layer, "num_attention_heads", None) or 0 for layer in text.per_layer_config),
        has_fused_attention=model._supports_sdpa,
        attends_to_all=_attends_to_all(text),
        stacked_parameters=_count_stacked(model, adapter),
        tensor_units=tensor_units,
        whole_parameters=whole_parameters,
        experts=experts,
        expert_parameters=of_experts,
        trained_expert_parameters=count_trained_experts(model, adapter),
        matmuls=count_matmuls(model, adapter, forward_names(type(model))),
    )


def _attends_to_all(text: Any) -> bool:
    kinds = getattr(text, "layer_types", None)
    windows = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping")
    return set(kinds) == {"full_attention"} if kinds else not any(getattr(text, name, None) for name in windows)


def _computed_width(text: Any) -> int:
    """Of the feed-forward part that is computed for a token: with experts, of those that it is given to."""
    # GPT-2 and its like name it otherwise, and leave out what is the usual four times the width.
    width = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    width = max(width) if isinstance(width, list) else width  # a layer each, as in Gemma 3n
    experts = getattr(text, "num_experts_per_tok", None)
    if not experts:
        return int(width)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return int(max(width, experts * (getattr(text, "moe_intermediate_size", None) or width) + shared))


def _count_stacked(model: nn.Module, adapter: Adapter) -> int:
    if not adapter.is_low_rank:
        return 0
    stacks = list_stacks(model)
    return sum(stacks[name].numel() for name in find_targets(model, adapter)[1])


def build_model(source: Source, plan: Plan, adapter: Adapter, weights: Path | None = None) -> nn.Module:
    """The model in train mode, on its device, or on the host where each rank is to take a part of it: what is trained
    in fp32, frozen weights in the compute type or quantised.

    `weights` is the folder of a checkpoint of a full fine-tune, read in the place of the base.

    Raises:
        ModelError: the weights are not whole.
    """
    full = adapter.type == "full"
    is_cut = plan.strategy in SHARDS_WEIGHTS or max(plan.expert, plan.pipeline, plan.tensor) > 1
    device = "cpu" if is_cut else plan.device
    dtype = DTYPES["fp32" if full else plan.precision]
    extra: dict[str, Any] = {}
    if adapter.type == "qlora":
        extra = {"quantization_config": make_quantization(adapter, dtype), "device_map": {"": device}}
    model = _load_weights(source, weights or source.folder, dtype, ATTENTION[plan.attention], **extra)
    if plan.attention == "sdpa":
        use_rows(model)
    if adapter.type == "qlora":
        make_trainable(model)
    else:
        model = model.to(device)
    if full:
        _own_weights(model)
    else:
        model = add_adapter(model, adapter, source, plan.seed)
        if adapter.init == "pissa":
            remember_start(model)
    if plan.gradient_checkpointing:
        _checkpoint_activations(model)
    if plan.activation_offloading:
        Offloading(model, get_base(model).base_model)
    return model.train()


def load_model(model: nn.Module, source: Source, folder: Path) -> None:
    """Put the weights of a folder in the place of the model's. Raises as `read_model`."""
    model.load_state_dict(read_model(model, source, folder))


def read_model(model: nn.Module, source: Source, folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, such as a checkpoint of a full fine-tune, by their names in this model.

    Raises:
        ModelError: they are not whole.
    """
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    return _load_weights(source, folder, torch.float32, str(attention)).state_dict()


def base_dtype(config: Any) -> torch.dtype:
    """The type in which the base model's weights were published."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), torch.float32)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights only: rotary frequencies and the like are buffers, which stay in fp32 wherever the model is loaded."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def get_base(model: nn.Module) -> nn.Module:
    """The transformers model inside, with or without adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_device(model: nn.Module) -> torch.device:
    """Where it computes. Of weights that other ranks have there may be shapes without memory."""
    return next(weight.device for weight in model.parameters() if not weight.is_meta)


@cache
def forward_names(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the arguments that a model's forward takes."""
    return frozenset(inspect.signature(kind.forward).parameters)


def _load_weights(source: Source, folder: Path, dtype: torch.dtype, attention: str, **extra: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **extra,
        )
    except Exception as error:  # safetensors, transformers and the operating system each have their own
        raise _unfit(source, "its weights cannot be loaded", error) from error
    # transformers would make up what is not there and go on.
    missing = sorted(report["missing_keys"]) + sorted(str(entry) for entry in report["mismatched_keys"])
    if missing:
        raise ModelError(
            f"{source.name}: its weights lack {', '.join(missing[:3])}; fetch the model again", param="model"
        )
    return model


def _own_weights(model: nn.Module) -> None:
    """Copy the weights out of the mapped file. There they lie at odd addresses, which change where a checkpoint is read
    instead, and matrix libraries round by the address: a resumed run would differ in the last bit."""
    for weight in model.parameters():
        weight.data = weight.data.clone()


def _checkpoint_activations(model: nn.Module) -> None:
    base = get_base(model)
    if not base.supports_gradient_checkpointing:
        param = "gradient_checkpointing"
        raise SpecError(f"{param}: {type(base).__name__} cannot do it; set it to false", param=param)
    base.activation_checkpointing_enable({"use_reentrant": False})


def _unfit(source: Source, what: str, error: Exception) -> ModelError:
    lines = str(error).strip().splitlines()
    return ModelError(f"{source.name}: {what} ({lines[0] if lines else type(error).__name__})", param="model")
