"""Whether a model computes rows laid end to end as it computes each by itself: tried, before anything is trained."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.rank.data import Trained, sequences_of
from training.rank.loss import NO_LABEL, begin_of, compute_logits, count_trained, cut_batch, make_batch
from training.rank.model import forward_names, get_base
from training.rank.passes import PassLimit, make_passes
from training.rank.sieve import Example

COMPARED_PLACES = 8


def find_trial_passes(examples: Sequence[Trained], limit: PassLimit) -> list[list[Example]]:
    """The pass with the most tokens, and one with the longest row beside the shortest: attention in chunks depends on
    where in a pass a row stands, and some positional encodings on the longest row of a pass."""
    by_length = sorted(examples, key=lambda example: -example.pass_tokens)
    fullest = max(make_passes(by_length, limit), key=lambda rows: sum(row.pass_tokens for row in rows))
    mixed = [by_length[0], *by_length[1:][-1:]]
    return [sequences_of(fullest), *([sequences_of(mixed)] if mixed != fullest else [])]


def depends_on_length(config: Any) -> bool:
    """Whether positions or attention are others in a long pass than in a short one, by the model's config."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    layers = set(getattr(text, "layer_types", None) or ())
    return bool(kinds & {"longrope", "dynamic"} or layers - {"full_attention", "sliding_attention"})


def keeps_rows_apart(model: nn.Module, device: torch.device, passes: Sequence[Sequence[Example]] = ()) -> bool:
    """Whether no row has an influence on the next, tried with a short pair, and each row of these passes comes out as
    when it is alone. They are not apart where a state is carried along (Mamba and its like), where positions are
    counted by the model itself, or where attention or positions depend on the whole of a pass."""
    if "position_ids" not in forward_names(type(get_base(model))):
        return False
    training = model.training
    model.eval()
    try:
        return _keeps_pair_apart(model, device) and all(
            _same_alone(model, device, [_last_places(row) for row in rows]) for rows in passes
        )
    finally:
        model.train(training)


@torch.no_grad()
def can_be_cut(model: nn.Module, device: torch.device, ranks: int) -> bool:
    """Whether this rank's piece of a pass that ranks share comes out as it does within the whole."""
    training = model.training
    model.eval()
    try:
        whole = make_batch([_probe(3, 4 * ranks + 1), _probe(19, 3 * ranks + 2)], device)
        piece = cut_batch(model, whole)
        own = torch.isin(whole.kept, piece.kept + begin_of(piece))
        alone = compute_logits(model, whole)[own]
        cut = compute_logits(model, piece)
    except Exception:  # its attention does not take it, each family in its own way
        return False
    finally:
        model.train(training)
    return not len(cut) or _is_same(cut, alone)


def _keeps_pair_apart(model: nn.Module, device: torch.device) -> bool:
    """Whether a second row has no gradient to the first, and the logits that it has alone. Equal logits beside other
    rows would say less: experts round by how many tokens they get."""
    first, second = _probe(3), _probe(19)
    seen: list[Tensor] = []

    def remember(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        seen.append(embedded.detach().requires_grad_())
        return seen[0]

    batch = make_batch([first, second], device)
    hook = get_base(model).get_input_embeddings().register_forward_hook(remember)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            logits = compute_logits(model, batch)[-7:]
    finally:
        hook.remove()
    (gradient,) = torch.autograd.grad(logits.float().square().sum(), seen[0])
    if gradient[0, : len(first.input_ids) - 1].any():
        return False
    with torch.no_grad():
        return _is_same(logits.detach(), compute_logits(model, make_batch([second], device)))


@torch.no_grad()
def _same_alone(model: nn.Module, device: torch.device, rows: list[Example]) -> bool:
    together = compute_logits(model, make_batch(rows, device)).split([count_trained([row]) for row in rows])
    for row, beside in zip(rows, together, strict=True):
        if not _is_same(beside, compute_logits(model, make_batch([row], device))):
            return False
    return True


def _is_same(beside: Tensor, alone: Tensor) -> bool:
    """By the median over the places: where experts are all but tied, rounding alone may choose another one."""
    apart = (beside.float() - alone.float()).abs().mean(-1).median() / alone.float().std()
    return float(apart) < (1e-4 if beside.dtype == torch.float32 else 5e-2)


def _last_places(row: Example) -> Example:
    """The row with labels at its last places only: the logits of all would take too much memory."""
    places = [place for place, label in enumerate(row.labels) if label != NO_LABEL and place][-COMPARED_PLACES:]
    labels = [NO_LABEL] * len(row.labels)
    for place in places:
        labels[place] = row.labels[place]
    return Example(row.line, row.input_ids, labels)


def _probe(start: int, length: int = 8) -> Example:
    ids = list(range(start, start + length))
    return Example(line=0, input_ids=ids, labels=ids)
