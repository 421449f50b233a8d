"""What a run minimises, behind one small protocol, so that the loop does not know."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.rank.data import Prepared
from training.rank.parallel import Parallel
from training.rank.passes import Pass, PassLimit, Scores
from training.rank.reference import as_reference

Sums = Mapping[str, float]


@dataclass(frozen=True)
class Window:
    """What is known of all the rows of a step, or of a validation file, before the first pass over them.

    The summed loss is divided by `weight`. `reference_point` is kto's.
    """

    weight: int
    reference_point: float = 0.0


class Objective(Protocol):
    """The examples are those that `prepare` made. Whatever is told of a window does not depend on how it is cut."""

    def prepare(self, path: Path, tokenizer: Any, max_seq_len: int) -> Prepared:
        """The examples of a file. Raises DataError and ModelError."""

    def weigh(self, examples: Sequence[Any]) -> int:
        """What the summed loss of examples is divided by: their trained tokens, or how many they are."""

    def open_window(
        self, parallel: Parallel, examples: Sequence[Any], limit: PassLimit, stop_asked: Callable[[], bool]
    ) -> Window | None:
        """None where a stop was asked for on the way."""

    def score(self, model: nn.Module, examples: Sequence[Any], window: Window) -> Scores:
        """One pass."""

    def make_metrics(self, sums: Sums, window: Window) -> dict[str, float]:
        """Metrics of a step, by their names."""

    def make_evaluation(self, sums: Sums, window: Window) -> dict[str, float]:
        """Metrics of a validation file, by their names."""


class Totals:
    """Sums over the passes of a window, in double precision."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []

    def add(self, scores: Scores, part: Pass[Any]) -> None:
        for name, value in {"loss": scores.loss, **scores.sums}.items():
            value = value.detach().double()
            value = value if part.counts else torch.zeros_like(value)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._losses.append(scores.loss.detach().double())

    def over_ranks(self, parallel: Parallel) -> tuple[dict[str, float], Tensor]:
        """The sums over all ranks, and (data ranks, passes) the summed loss of each pass, in one exchange."""
        sums, losses = torch.stack(list(self._sums.values())), torch.stack(self._losses)
        table = losses.new_zeros(parallel.data_ranks, len(losses))
        table[parallel.data_rank] = losses
        whole = parallel.total(torch.cat([sums, table.flatten()]))
        return dict(zip(self._sums, whole[: len(sums)].tolist(), strict=True)), whole[len(sums) :].view_as(table)


@contextmanager
def judging(model: nn.Module, *, reference: bool = False) -> Iterator[None]:
    """Without gradients and dropout, and so without drawing random numbers; where asked, as the reference."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), as_reference(model) if reference else nullcontext():
            yield
    finally:
        model.train(training)
