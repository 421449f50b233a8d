"""One forward pass: rows laid end to end without padding, the output head only where a label is, the loss in fp32."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.rank.adapters import prompt_tokens
from training.rank.context import Split, cut_pass, find_members
from training.rank.head import find_head, is_trained, list_losses, passing_through, sum_losses
from training.rank.model import forward_names, get_base
from training.rank.order import cut
from training.rank.sieve import Example

NO_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """Some rows as one sequence. `kept` are the places whose next token carries loss, `targets` those tokens."""

    input_ids: Tensor
    "(1, tokens)"
    position_ids: Tensor | None
    "(1, tokens), beginning at 0 with each row, which is where models see that attention must end; None for one row."
    kept: Tensor
    "(trained tokens,)"
    targets: Tensor
    "(trained tokens,)"
    split: Split | None = None
    "Where this is a piece of a pass."


def count_tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.input_ids) for example in examples)


def count_trained(examples: Sequence[Example]) -> int:
    """Tokens that carry loss. The first token of a row never does: nothing comes before it."""
    return sum(label != NO_LABEL for example in examples for label in example.labels[1:])


def make_batch(examples: Sequence[Example], device: torch.device) -> Batch:
    """Raises ValueError for a row that has nothing to train."""
    ids: list[int] = []
    positions: list[int] = []
    kept: list[int] = []
    targets: list[int] = []
    for example in examples:
        places = [place for place, label in enumerate(example.labels[1:]) if label != NO_LABEL]
        kept += [len(ids) + place for place in places]
        targets += [example.labels[place + 1] for place in places]
        # What follows the last place that predicts a trained token cannot change any loss.
        used = max(places) + 1
        ids += example.input_ids[:used]
        positions += range(used)

    def tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=device)

    several = len(examples) > 1
    return Batch(tensor([ids]), tensor([positions]) if several else None, tensor(kept), tensor(targets))


def score(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of the trained tokens, and how many of them were the most likely ones; of this rank's
    piece where ranks share a pass."""
    batch = cut_batch(model, batch)
    head = find_head(get_base(model))
    if head is not None:
        return sum_losses(compute_hidden(model, batch, head), batch.targets, head)
    logits = compute_logits(model, batch)
    loss = functional.cross_entropy(logits.float(), batch.targets, reduction="sum")
    return loss, (logits.detach().argmax(-1) == batch.targets).sum()


def cut_batch(model: nn.Module, batch: Batch) -> Batch:
    """This rank's piece of a pass, or all of it. A piece may have no trained token."""
    members = find_members(get_base(model))
    if members is None:
        return batch
    ids, positions, split = cut_pass(batch.input_ids, batch.position_ids, members)
    kept = batch.kept - split.begin
    own = (kept >= 0) & (kept < ids.shape[1])
    return replace(
        batch,
        input_ids=ids,
        position_ids=positions,
        kept=kept[own],
        targets=batch.targets[own],
        split=split,
    )


def log_probabilities(model: nn.Module, examples: Sequence[Example], rows_per_pass: int) -> Tensor:
    """(rows,): of each row the summed log-probability of its trained tokens, in fp32."""
    device = next(model.parameters()).device
    found = []
    for rows in cut(examples, rows_per_pass):
        of_tokens = -_list_losses(model, make_batch(rows, device))
        found += [of_row.sum() for of_row in of_tokens.split([count_trained([row]) for row in rows])]
    return torch.stack(found)


def compute_logits(model: nn.Module, batch: Batch) -> Tensor:
    """(trained tokens, vocabulary)."""
    taken = forward_names(type(get_base(model)))
    kept = batch.kept + prompt_tokens(model)
    arguments: dict[str, Any] = {"logits_to_keep": kept, "position_ids": batch.position_ids}
    arguments = {name: value for name, value in arguments.items() if name in taken and value is not None}
    if batch.split is not None:
        # The mask is nobody's: rows are kept apart by what attention is told.
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kept.device)
        arguments |= {"split": batch.split, "attention_mask": nothing}
    logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **arguments).logits[0]
    # A model that does not know which places are wanted has computed them all.
    return logits if len(logits) == len(kept) else logits[kept]


def compute_hidden(model: nn.Module, batch: Batch, head: nn.Module) -> Tensor:
    """(trained tokens, width): what the head makes the logits of."""
    with passing_through(head):
        return compute_logits(model, batch)


def _list_losses(model: nn.Module, batch: Batch) -> Tensor:
    head = find_head(get_base(model))
    if head is not None and not is_trained(head):
        return list_losses(compute_hidden(model, batch, head), batch.targets, head)
    return functional.cross_entropy(compute_logits(model, batch).float(), batch.targets, reduction="none")
