"""What a token of a pass bears on: tried, before anything is trained. Whether a model sees what it is to predict, and
whether it computes rows laid end to end as it computes each by itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from training.adapter import Adapter
from training.errors import ModelError, SpecError
from training.rank.data import Trained, sequences_of
from training.rank.failure import explain
from training.rank.loss import NO_LABEL, Batch, compute_logits, count_trained, cut_batch, make_batch
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
    is_scaled = getattr(text, "log_scaling_n_floor", None) is not None
    return is_scaled or bool(kinds & {"longrope", "dynamic"} or layers - {"full_attention", "sliding_attention"})


def require_trainable(model: nn.Module, device: torch.device, adapter: Adapter) -> None:
    """Raises ModelError for a model that cannot be computed, and for one that would be trained to tell what it sees;
    SpecError where it cannot be computed in 4 or 8 bits, or with a prefix or prompt."""
    base = get_base(model)
    name = type(base).__name__
    with _told(f"{name} cannot be computed with quantised weights" if adapter.type == "qlora" else None, name):
        ahead = looks_ahead(base, device)
    if ahead:
        message = f"{name} is not a causal language model here: it sees the tokens that it is to predict"
        if getattr(base.config, "is_decoder", None) is False:
            message += "; where it was trained as a decoder, set is_decoder to true in its config.json"
        raise ModelError(message, param="model")
    if adapter.virtual_tokens:
        what = f"{name} cannot be computed with a {adapter.type}"
        with _told(what, name):
            bears = _bears_prompt(model, device)
        if not bears:
            raise _refuse(what, "it passes it by")


@contextmanager
def _told(what: str | None, name: str) -> Iterator[None]:
    """Whatever the code of a model trips over, as an error of the adapter where there is something to say of it."""
    try:
        yield
    except Exception as error:
        failure = explain(error)
        if failure.code != "internal_error":
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if what is None:
            message = f"this kind of model cannot be computed: {name} fails ({reason})"
            raise ModelError(message, param="model") from error
        raise _refuse(what, reason) from error


def _refuse(what: str, reason: str) -> SpecError:
    return SpecError(f'adapter.type: {what} ({reason}); set it to "lora"', param="adapter.type")


def _bears_prompt(model: nn.Module, device: torch.device) -> bool:
    training = model.training
    model.eval()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        with torch.enable_grad():
            logits = compute_logits(model, make_batch([_probe(3)], device))
            gradients = torch.autograd.grad(logits.float().square().sum(), trained, allow_unused=True)
    finally:
        model.train(training)
    return any(bool(gradient.any()) for gradient in gradients if gradient is not None)


def looks_ahead(model: nn.Module, device: torch.device) -> bool:
    """Whether tokens bear on the logits of the places before them, as in an encoder."""
    training = model.training
    model.eval()
    try:
        _, influence = _trace(model, make_batch([_probe(3)], device), slice(0, 3))
    finally:
        model.train(training)
    # Not exactly 0 where masked parts are subtracted again.
    return bool(influence[3:].max() > 1e-4 * influence[:3].max())


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
        begin = 0 if piece.split is None else piece.split.begin
        own = torch.isin(whole.kept, piece.kept + begin)
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
    logits, influence = _trace(model, make_batch([first, second], device), slice(-7, None))
    if influence[: len(first.input_ids) - 1].any():
        return False
    with torch.no_grad():
        return _is_same(logits, compute_logits(model, make_batch([second], device)))


def _trace(model: nn.Module, batch: Batch, places: slice) -> tuple[Tensor, Tensor]:
    """Some of the logits of a pass, and how much each of its tokens bears on them: the gradient to its embedding."""
    seen: list[Tensor] = []

    def remember(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        seen.append(embedded.detach().requires_grad_())
        return seen[-1].clone()  # some models scale their embeddings in place

    hook = get_base(model).get_input_embeddings().register_forward_hook(remember)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            logits = compute_logits(model, batch)[places]
    finally:
        hook.remove()
    gradients = torch.autograd.grad(logits.float().square().sum(), seen, allow_unused=True)
    tokens = batch.input_ids.numel()
    found = [gradient.float().abs().flatten(0, -2).sum(-1) for gradient in gradients if gradient is not None]
    found = [of_tokens[-tokens:] for of_tokens in found if len(of_tokens) >= tokens]  # some put tokens of theirs before
    if not found:
        raise ValueError("its logits do not depend on the embeddings of its tokens")
    return logits.detach(), torch.stack(found).sum(0)


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
