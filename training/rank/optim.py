"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and the learning rate of each step."""

import math

import torch
from torch import nn

from training.plan import Plan


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """AdamW over what is trained. Weight decay is for matrices; norms and biases have a scale of their own to keep."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=plan.learning_rate, fused=True)


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
