"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), in 8 bits (Dettmers et al. 2022, arXiv:2110.02861) or not,
Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), and the learning rate of each step."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.plan import Plan


def build_optimizer(weights: Mapping[str, nn.Parameter], plan: Plan) -> torch.optim.Optimizer:
    groups, rate = _make_groups(weights, plan), plan.learning_rate
    match plan.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, fused=True)
        case "adafactor":
            from transformers import Adafactor

            # The rate is the plan's, as with the others, and not made from the step and the size of the weights.
            return Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False, warmup_init=False)
        case "adamw_8bit" | "paged_adamw_8bit":
            import bitsandbytes

            kind = bitsandbytes.optim.AdamW8bit if plan.optimizer == "adamw_8bit" else bitsandbytes.optim.PagedAdamW8bit
            return kind(groups, lr=rate)


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
    if plan.lr_scheduler == "wsd":
        # 1 - sqrt, the best of the decays tried (Haegele et al. 2024, arXiv:2405.18392).
        decayed = step - 1 - (plan.steps - plan.decay_steps)
        return plan.learning_rate * (1 - math.sqrt(max(0, decayed) / max(1, plan.decay_steps)))
    factors = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    return plan.learning_rate * factors[plan.lr_scheduler]


def _make_groups(weights: Mapping[str, nn.Parameter], plan: Plan) -> list[dict[str, Any]]:
    """Weight decay is for matrices; norms and biases have a scale of their own to keep. The second matrices of adapters
    have their own rate (LoRA+)."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in weights.items():
        if weight.requires_grad:
            decay = plan.weight_decay if weight.ndim >= 2 else 0.0
            factor = plan.lora_plus_ratio if ".lora_B." in name else 1.0
            groups.setdefault((decay, factor), []).append(weight)
    if not groups:  # of a rank that has moments of no weight
        groups[0.0, 1.0] = []
    return [{"params": some, "weight_decay": decay, "rate_factor": factor} for (decay, factor), some in groups.items()]
