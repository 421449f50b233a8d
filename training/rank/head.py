"""The output head and the cross-entropy, some tokens at a time: the logits of a whole pass, by far the largest tensor
of a small model, never exist."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from training.memory import CHUNK_BYTES

FP16_FACTOR = 1024.0
"""Gradients of logits are at most 1 and most far below what fp16 can tell from 0."""


@dataclass(frozen=True)
class _Part:
    """Of a head that is split among ranks by the vocabulary: this rank's tokens, from which one on."""

    first: int
    members: dist.ProcessGroup

    def highest(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.members)
        return value

    def total(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.members)
        return value


_heads: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def find_head(model: nn.Module) -> nn.Module | None:
    """The head of a transformers model, or None where the logits are not simply what it gives (Gemma 2 squashes them):
    tried once a model."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return None
    if model not in _heads:
        _heads[model] = _gives_logits(model, head)
    return head if _heads[model] else None


def passing_through(head: nn.Module) -> AbstractContextManager[None]:
    """The head gives what it takes, and so the model does."""
    return acting_as(head, hand_on)


@contextmanager
def acting_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def hand_on(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def sum_losses(hidden: Tensor, targets: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of `targets` (n,) after `hidden` (n, width), in fp32, and how many of them were the most
    likely ones."""
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or weights):
        losses, right = _Losses.apply(hidden, targets, head, True, *weights)
        return losses, right
    parts = _measure_each(hidden, targets, head)
    return torch.stack([losses.sum() for losses, *_ in parts]).sum(), torch.stack(
        [right for _, right, _ in parts]
    ).sum()


def list_losses(hidden: Tensor, targets: Tensor, head: nn.Module) -> Tensor:
    """(n,): as above, of each token by itself. Only for a frozen head."""
    if torch.is_grad_enabled() and hidden.requires_grad:
        losses: Tensor = _Losses.apply(hidden, targets, head, False)[0]
        return losses
    return torch.cat([losses for losses, *_ in _measure_each(hidden, targets, head)])


def is_trained(head: nn.Module) -> bool:
    return any(weight.requires_grad for weight in head.parameters())


class _Losses(torch.autograd.Function):
    """Computes the gradient together with the loss, while the logits of some tokens are at hand, by the operations that
    the backward pass would use: none more, none twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: nn.Module, summed: bool, *weights: Tensor) -> Any:
        ctx.factor, ctx.summed = _find_factor(hidden, is_trained(head), _count_rows(hidden, head)), summed
        of_weights = [torch.zeros_like(weight) for weight in weights]
        of_hidden, losses, right, own = [], [], targets.new_zeros(()), _find_part(head)
        for some, wanted in _cut(hidden, targets, head):
            with torch.enable_grad():
                part = some.detach().requires_grad_()
                # Through a view: tools that hook into modules, as PyTorch's FLOP counter does, refuse a leaf here.
                logits = _make_logits(head, part.view_as(part), own)
            of_tokens, of_right, of_logits = _measure(logits.detach(), wanted, own)
            losses.append(of_tokens)
            right += of_right
            out = of_logits.mul_(ctx.factor).to(logits.dtype)
            found, *of_part = torch.autograd.grad(logits, [part, *weights], out)
            of_hidden.append(found)
            for total, more in zip(of_weights, of_part, strict=True):
                total += more
        of_every = torch.cat(of_hidden)
        ctx.save_for_backward(of_every if own is None else own.total(of_every), *of_weights)
        ctx.mark_non_differentiable(right)
        every = torch.cat(losses)
        return (every.sum() if summed else every), right

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor, _: Tensor) -> Any:
        of_hidden, *of_weights = ctx.saved_tensors
        scale = of_losses / ctx.factor
        of_hidden = (of_hidden * (scale if ctx.summed else scale.unsqueeze(1))).to(of_hidden.dtype)
        return of_hidden, None, None, None, *(total * scale for total in of_weights)


def _find_factor(hidden: Tensor, trained: bool, rows: int) -> float:
    """What gradients of logits are multiplied by meanwhile, a power of 2. That of a trained head is a sum over `rows`
    tokens, which has to stay within fp16: half of 65504 at most."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.float16:
        return 1.0
    most = min(rows, len(hidden)) * float(hidden.abs().amax()) if trained and len(hidden) else 0.0
    if not 0 < most < math.inf:
        return FP16_FACTOR
    return float(min(FP16_FACTOR, 2.0 ** math.floor(math.log2(2**15 / most))))


def _count_rows(hidden: Tensor, head: nn.Module) -> int:
    """As many as there are logits of at once."""
    vocabulary = max(max(weight.shape) for weight in head.parameters())
    rows = max(1, CHUNK_BYTES[hidden.device.type] // (4 * vocabulary))
    # The gradient of a trained head is as large as itself, and added up each time.
    return 4 * rows if is_trained(head) else rows


def _cut(hidden: Tensor, targets: Tensor, head: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    rows = _count_rows(hidden, head)
    return zip(hidden.split(rows), targets.split(rows), strict=True)


def _find_part(head: nn.Module) -> _Part | None:
    weight = getattr(head, "weight", None)
    if type(head) is not nn.Linear or not isinstance(weight, DTensor):
        return None
    ranks = weight.device_mesh
    return _Part(-(-weight.shape[0] // ranks.size()) * ranks.get_local_rank(), ranks.get_group())


def _make_logits(head: nn.Module, hidden: Tensor, own: _Part | None) -> Tensor:
    """Those of this rank's tokens alone, where the head is split."""
    if own is not None:
        weight, bias = (weight if weight is None else weight.to_local() for weight in (head.weight, head.bias))  # type: ignore[union-attr,operator]
        return functional.linear(hidden, weight, bias)
    logits: Tensor = head(hidden)
    return logits.clone() if logits._is_view() else logits  # they are overwritten


def _measure_each(hidden: Tensor, targets: Tensor, head: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    own = _find_part(head)
    return [_measure(_make_logits(head, some, own), wanted, own) for some, wanted in _cut(hidden, targets, head)]


def _measure(logits: Tensor, targets: Tensor, own: _Part | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits (n, vocabulary), which are overwritten where they are fp32: the losses (n,), how many targets were the
    most likely, and the gradient of the summed losses, softmax - 1 at the target."""
    logits = logits.float()
    largest = logits.amax(-1)
    if own is not None:  # Megatron-LM's (Shoeybi et al. 2019, section 3): three numbers of each token are exchanged
        largest, targets = own.highest(largest), targets - own.first
    mine = (targets >= 0) & (targets < logits.shape[1])
    place = targets.where(mine, 0)
    chosen = logits.gather(1, place.unsqueeze(1)).squeeze(1).where(mine, 0.0)
    logits = logits.sub_(largest.unsqueeze(1)).exp_()
    total = logits.sum(-1)
    if own is not None:
        total, chosen = own.total(torch.stack([total, chosen]))
    losses = total.log() + largest - chosen
    logits.div_(total.unsqueeze(1))
    logits[torch.arange(len(targets), device=targets.device), place] -= mine.to(logits.dtype)
    return losses, (chosen == largest).sum(), logits


@torch.no_grad()
def _gives_logits(model: nn.Module, head: nn.Module) -> bool:
    training = model.training
    model.eval()
    given: list[Tensor] = []
    hook = head.register_forward_hook(lambda _module, _inputs, output: given.append(output))
    try:
        ids = torch.arange(3, 11, device=next(model.parameters()).device).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
        model.train(training)
    # Compared bit by bit: what is done to small logits may be next to nothing.
    return len(given) == 1 and torch.equal(given[0], logits)
