"""A model cut into stages of some of its layers each, made by its own forward pass: layers of other stages hand on what
they are given, and in the place of the embeddings stands what the stage before has made."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from training.rank.fsdp import find_layers
from training.rank.head import acting_as, hand_on
from training.rank.model import forward_names, get_base

PROBED_TOKENS = 64


@dataclass(frozen=True)
class Parts:
    """Of a causal language model. `tail` is what has weights after the layers: the last norm and the head."""

    trunk: nn.Module
    embedding: nn.Module
    layers: Sequence[nn.Module]
    tail: Sequence[nn.Module]


def find_parts(model: nn.Module) -> Parts:
    base = get_base(model)
    embedding, layers = base.get_input_embeddings(), find_layers(base)  # type: ignore[operator]
    return Parts(base.base_model, embedding, layers, list(_find_rest(base, {embedding, *layers})))


def run_trunk(parts: Parts, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """(1, tokens, width): what comes out of the layers, after the last norm."""
    given = {} if position_ids is None else {"position_ids": position_ids}
    hidden: Tensor = parts.trunk(input_ids=input_ids, use_cache=False, **given).last_hidden_state
    return hidden


@dataclass(frozen=True)
class Cut:
    """Stage `number` of as many as `layers_of` says how many layers each has. Stages are dealt to the ranks in turn."""

    number: int
    layers_of: Sequence[int]

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == len(self.layers_of) - 1

    def find_others(self, parts: Parts) -> list[nn.Module]:
        """What is not of this stage, but for the embeddings."""
        begin = sum(self.layers_of[: self.number])
        end = begin + self.layers_of[self.number]
        return [*parts.layers[:begin], *parts.layers[end:], *([] if self.is_last else parts.tail)]

    @contextmanager
    def at_work(self, parts: Parts, received: Tensor | None) -> Iterator[None]:
        """The model computes this stage alone, on what it has received; the first on the embeddings."""
        with ExitStack() as stack:
            if received is not None:
                stack.enter_context(acting_as(parts.embedding, lambda *_, **__: received))
            for module in self.find_others(parts):
                stack.enter_context(acting_as(module, hand_on))
            yield


def make_cuts(layers_of: Sequence[int]) -> list[Cut]:
    return [Cut(number, layers_of) for number in range(len(layers_of))]


@torch.no_grad()
def try_cuts(model: nn.Module, cuts: Sequence[Cut]) -> Tensor | None:
    """What one stage hands to the next, where all of them one after the other give what the whole model gives, bit for
    bit; else None. Tried with two short rows."""
    parts, training = find_parts(model), model.training
    ids = torch.arange(3, 19).unsqueeze(0)
    positions = (ids - 3) % 8 if "position_ids" in forward_names(type(parts.trunk)) else None
    model.eval()
    try:
        whole = run_trunk(parts, ids, positions)
        handed, made = _run_each(parts, cuts, ids, positions)
    except Exception:  # whatever a model's code trips over that is given something else than it expects
        return None
    finally:
        model.train(training)
    return handed if torch.equal(made, whole) else None


def find_homes(model: nn.Module, cuts: Sequence[Cut], ranks: int) -> dict[str, int]:
    """On which rank of a pipeline each weight is, by the names in the model's `state_dict`."""
    parts = find_parts(model)
    homes: dict[nn.Module, int] = dict.fromkeys(parts.tail, (len(cuts) - 1) % ranks)
    layers = iter(parts.layers)
    for cut in cuts:
        for _ in range(cut.layers_of[cut.number]):
            homes[next(layers)] = cut.number % ranks
    prefixes = {f"{name}.": homes[module] for name, module in model.named_modules() if module in homes}
    return {
        name: next((home for prefix, home in prefixes.items() if name.startswith(prefix)), 0)
        for name in model.state_dict()
    }


def keep_own(model: nn.Module, cuts: Sequence[Cut], device: torch.device) -> None:
    """Put the stages of a rank on its device, and leave of others shapes without memory, which hand on what they are
    given. So the model can still be tried by itself, on embeddings that are not its own."""
    parts = find_parts(model)
    others = [set(cut.find_others(parts)) for cut in cuts]
    for module in set.intersection(*others):
        _empty(module, hand_on)
    if not any(cut.is_first for cut in cuts):
        weight = next(parts.embedding.parameters())
        _empty(parts.embedding, partial(_embed_few, weight.detach()[:PROBED_TOKENS].to(device, copy=True)))
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def _run_each(parts: Parts, cuts: Sequence[Cut], ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the last stage has received, and what it makes of it."""
    handed = made = None
    for cut in cuts:
        handed = made
        with cut.at_work(parts, handed):
            made = run_trunk(parts, ids, positions)
    return handed, made  # type: ignore[return-value]  # there are at least two


def _empty(module: nn.Module, forward: Any) -> None:
    module.to("meta").requires_grad_(False)
    module.forward = forward


def _embed_few(weight: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.embedding(ids % len(weight), weight)


def _find_rest(module: nn.Module, known: set[nn.Module]) -> Iterator[nn.Module]:
    """The outermost modules with weights that are none of the known ones and hold none of them."""
    for child in module.children():
        if child in known:
            continue
        if known.intersection(child.modules()):
            yield from _find_rest(child, known)
        elif any(True for _ in child.parameters()):
            yield child
