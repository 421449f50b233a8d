"""Frozen weights in 4 or 8 bits through bitsandbytes (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""

import logging
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from training.adapter import Adapter
from training.errors import SpecError
from training.rank.lora import list_linear


def count_quantised(model: Any) -> int:
    """The weights that would be quantised: those of linear layers but the output head.

    Raises:
        SpecError: there are none. transformers takes no layers of a kind of their own, such as Falcon's.
    """
    head = model.get_output_embeddings()
    layers = [module for module in list_linear(model).values() if type(module) in (nn.Linear, Conv1D)]
    count = sum(module.weight.numel() for module in layers if module is not head)
    if not count:
        what = f"no layer of {model.config.model_type} can be quantised"
        raise SpecError(f'adapter.type: {what}; set it to "lora"', param="adapter.type")
    return count


def make_quantization(adapter: Adapter, compute_type: torch.dtype) -> Any:
    """What transformers is told when it loads the weights."""
    from transformers import BitsAndBytesConfig

    if adapter.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=adapter.quant_type,
        bnb_4bit_use_double_quant=adapter.double_quant,
        bnb_4bit_compute_dtype=compute_type,
    )


def make_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes from what suits inference only."""
    # It says with every product in 8 bits that it computes in fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for module in model.modules():
        # On CPUs with bf16 it would repack the weights at the first evaluation, for kernels that have no gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        if hasattr(module, "init_8bit_state"):
            _keep_8_bits_alike(module)


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Of weights in 4 bits that are split among ranks: their scales are no weights, and each rank keeps all of them."""
    for module in model.modules():
        if getattr(module, "quant_state", None) is not None:
            module.quant_state.to(device)


def _keep_8_bits_alike(layer: Any) -> None:
    """Outside of training bitsandbytes takes the inputs in 8 bits too on a CPU: evaluations, and what preferences are
    compared with, would be computed otherwise than what is trained. And where peft unpacks the weights for DoRA there,
    it puts them back without their scales."""

    def take_weights() -> None:
        state, weight = layer.state, layer.weight
        state.CB, state.SCB = weight.CB, state.SCB if weight.SCB is None else weight.SCB
        weight.CB = weight.SCB = None

    layer.init_8bit_state = take_weights
    layer.train()
    layer.train = lambda _mode=True: layer
