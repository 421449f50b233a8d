"""Context parallelism, as DeepSpeed-Ulysses does it (Jacobs et al. 2023, arXiv:2309.14509): each rank computes a piece
of a pass. Around attention the ranks exchange: before it each gets some heads of all tokens, after it all heads of its
own tokens again."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from training.rank.group import Ranks

_Way = Callable[[Tensor, Ranks], Tensor]
_members: WeakKeyDictionary[nn.Module, Ranks] = WeakKeyDictionary()


@dataclass(frozen=True)
class Split:
    """Handed through the model to its attention: whose pieces make a pass, the lengths of all of its rows, and where
    this rank's piece begins."""

    members: Ranks
    row_tokens: list[int]
    begin: int


def split_passes(base: nn.Module, ranks: int) -> None:
    """From now on each pass of a transformers model is shared by so many neighbouring ranks. All ranks call it."""
    group, _ = dist.new_subgroups(ranks)
    _members[base] = Ranks(group)


def find_members(base: nn.Module) -> Ranks | None:
    """Who shares the passes of a model; None where each rank computes whole ones."""
    return _members.get(base)


def cut_pass(input_ids: Tensor, position_ids: Tensor | None, members: Ranks) -> tuple[Tensor, Tensor, Split]:
    """Of a pass (1, tokens) this rank's piece, (1, tokens / ranks), with its positions, and the pass as attention has
    to know it. Tokens that fill the last piece up are a row of their own, which nothing sees."""
    tokens, device = input_ids.shape[1], input_ids.device
    fill = -tokens % members.ranks
    positions = torch.arange(tokens, device=device) if position_ids is None else position_ids[0]
    positions = torch.cat([positions, torch.arange(fill, device=device)])
    ids = functional.pad(input_ids[0], (0, fill))
    begins = (positions == 0).nonzero().flatten()
    row_tokens = torch.cat([begins, begins.new_tensor([len(ids)])]).diff().tolist()
    size = len(ids) // members.ranks
    begin = members.rank * size
    own = slice(begin, begin + size)
    return ids[own].unsqueeze(0), positions[own].unsqueeze(0), Split(members, row_tokens, begin)


def attend(query: Tensor, key: Tensor, value: Tensor, split: Split, scale: float | None, dropout: float) -> Tensor:
    """Causal attention within the rows of a whole pass. Query, key and value are this rank's piece, (1, heads, places,
    size of a head); so is the result, (1, places, heads, size)."""
    ranks = split.members.ranks
    # Each rank needs as many heads of the keys as any other.
    times = ranks // math.gcd(ranks, key.shape[1])
    key, value = (states.repeat_interleave(times, 1) if times > 1 else states for states in (key, value))
    exchanged = (_Exchange.apply(states, _to_heads, _to_places, split.members) for states in (query, key, value))
    whole = [states.split(split.row_tokens, dim=2) for states in exchanged]
    rows = [
        functional.scaled_dot_product_attention(
            *row, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=row[0].shape[1] != row[1].shape[1]
        )
        for row in zip(*whole, strict=True)
    ]
    out: Tensor = _Exchange.apply(torch.cat(rows, dim=2), _to_places, _to_heads, split.members)
    return out.transpose(1, 2).contiguous()


class _Exchange(torch.autograd.Function):
    """One of the two ways below; the gradient takes the other."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, way: _Way, back: _Way, members: Ranks) -> Tensor:
        ctx.back, ctx.members = back, members
        return way(states, members)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient, ctx.members), None, None, None


def _to_heads(states: Tensor, members: Ranks) -> Tensor:
    """(1, heads, places / ranks, size) -> (1, heads / ranks, places, size)."""
    _, heads, places, size = states.shape
    got = _swap(states.reshape(members.ranks, heads // members.ranks, places, size), members)
    return got.transpose(0, 1).reshape(1, heads // members.ranks, members.ranks * places, size)


def _to_places(states: Tensor, members: Ranks) -> Tensor:
    """(1, heads / ranks, places, size) -> (1, heads, places / ranks, size)."""
    _, heads, places, size = states.shape
    got = _swap(states.reshape(heads, members.ranks, places // members.ranks, size).transpose(0, 1), members)
    return got.reshape(1, members.ranks * heads, places // members.ranks, size)


def _swap(parts: Tensor, members: Ranks) -> Tensor:
    """Each rank is sent its part, (ranks, ...), and gets one of each."""
    got = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(got, parts.contiguous(), group=members.members)
    return got
