"""PiSSA (Meng et al. 2024, arXiv:2404.02948): adapters that begin as the principal part of the weights, which is taken
out of the frozen ones. What is delivered is a plain adapter of twice the rank, for the base as it was published."""

from typing import Any

import torch
from torch import Tensor, nn

START = "pissa_start"


def is_pissa(model: nn.Module) -> bool:
    return hasattr(model, START)


def remember_start(model: nn.Module) -> None:
    """Keep the adapters as they begin, to be able to tell later what was learnt."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    setattr(model, START, {name: weight.detach().clone() for name, weight in state.items() if _is_matrix(name)})


def as_plain_lora(
    model: nn.Module, state: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and config of an adapter that does to the published base what this one does to what is left of it:
    B A - B0 A0 is the product of [B, -B0] and [A; A0]."""
    start: dict[str, Tensor] = getattr(model, START)
    both = dict(state)
    for name, first in start.items():
        if "lora_A" in name:
            both[name] = torch.cat([state[name], first], dim=0)
        else:
            both[name] = torch.cat([state[name], -first], dim=1)
    r = config["r"]
    scale = config["lora_alpha"] / (r**0.5 if config["use_rslora"] else r)
    plain = {"r": 2 * r, "lora_alpha": scale * 2 * r, "use_rslora": False, "init_lora_weights": True}
    return both, {**config, **plain}


def trained_part(model: nn.Module, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapter itself, out of one that `as_plain_lora` made."""
    start: dict[str, Tensor] = getattr(model, START)
    own = dict(saved)
    for name, first in start.items():
        own[name] = saved[name][: len(first)] if "lora_A" in name else saved[name][:, : first.shape[1]]
    return own


def _is_matrix(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
