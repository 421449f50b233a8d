"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and the learning rate of each step."""

import math
from typing import Any

import torch
from torch import nn

from training.plan import Plan


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW(_make_groups(model, plan), lr=plan.learning_rate, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate_factor"]


def learning_rate_at(step: int, plan: Plan) -> float:
    """The rate of optimizer step `step`, counted from 1.

    Warm-up: step / warmup_steps of the peak, so that no step is spent at rate 0. Afterwards as in transformers, whose
    factor for the n-th step is that of n - 1: the peak at first, 0 only after the last step.
    """
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    done = (step - 1 - plan.warmup_steps) / (plan.steps - plan.warmup_steps)
    factors = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    return plan.learning_rate * factors[plan.lr_scheduler]


def _make_groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Weight decay is for matrices; norms and biases have a scale of their own to keep. The second matrices of adapters
    have their own rate (LoRA+)."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            decay = plan.weight_decay if weight.ndim >= 2 else 0.0
            factor = plan.lora_plus_ratio if ".lora_B." in name else 1.0
            groups.setdefault((decay, factor), []).append(weight)
    return [
        {"params": weights, "weight_decay": decay, "rate_factor": factor} for (decay, factor), weights in groups.items()
    ]
