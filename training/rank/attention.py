"""PyTorch's fused attention for rows that lie end to end in one pass: each row by itself, with no mask.

With a mask the kernels compute all pairs of places, most of them for nothing, and each layer keeps the mask, a number
for each pair. Which rows there are is read from the mask that transformers makes; where that is more than rows of plain
causal attention, such as a window shorter than a row, it is left to do its work, and so it is in families whose own
code changes it on the way.
"""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from training.rank.context import Split, attend

BY_ROW = "sdpa_by_row"
"""As transformers knows it."""

_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of a mask its version and the lengths of its rows."""


def use_rows(model: Any) -> None:
    """Let a transformers model with PyTorch's fused attention attend row by row.

    It keeps PyTorch's own where it does not call it through transformers' interface, or asks for it by its name: there
    it does what that needs itself, such as to mask what a sparse attention leaves out.
    """
    family = inspect.getsource(sys.modules[type(model).__module__])
    if type(model)._can_set_attn_implementation() and '"sdpa"' not in family:
        model.set_attn_implementation(BY_ROW)


def find_rows(mask: Tensor) -> Tensor | None:
    """The lengths of the rows that a mask (1, 1, places, places), true where a place is seen, keeps apart; None where
    it is anything else than causal attention within rows."""
    if mask.dtype != torch.bool or mask.shape[:2] != (1, 1) or mask.shape[2] != mask.shape[3]:
        return None
    seen, places = mask[0, 0], torch.arange(mask.shape[2], device=mask.device)
    begins = seen.int().argmax(-1) == places
    first = torch.where(begins, places, 0).cummax(0).values
    if not torch.equal(seen, (places <= places.unsqueeze(1)) & (places >= first.unsqueeze(1))):
        return None
    edges = torch.cat([places[begins], places.new_tensor([len(places)])])
    return edges.diff()


def _lengths_of(mask: Tensor) -> list[int] | None:
    """As `find_rows`, remembered for as long as the mask lives: all layers get the same."""
    version, lengths = _rows.get(mask, (None, None))
    if version != mask._version:
        rows = find_rows(mask)
        lengths = None if rows is None else rows.tolist()
        _rows[mask] = (mask._version, lengths)
    return lengths


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    split: Split | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Query, key and value are (1, heads, places, size of a head); the result is (1, places, heads, size)."""
    if split is not None:
        return attend(query, key, value, split, more.get("scaling"), more.get("dropout", 0.0)), None
    lengths = None if attention_mask is None else _lengths_of(attention_mask)
    if lengths is None or more.get("position_bias") is not None:  # what is added to each pair of places of the pass
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *part, None, **more)[0] for part in parts], dim=1), None


AttentionInterface.register(BY_ROW, _attend)
AttentionMaskInterface.register(BY_ROW, sdpa_mask)
