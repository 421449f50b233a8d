"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306): desirable answers above a reference point,
undesirable ones below it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.rank.data import Example, Labelled, Prepared, prepare_labelled
from training.rank.loss import log_probabilities
from training.rank.objective import Sums, Window, judging
from training.rank.parallel import Parallel
from training.rank.passes import PassLimit, Scores, share_passes


@dataclass(frozen=True)
class Kto:
    """The reference is the model itself without its adapter, or with the one that the job started with.

    The reference point, the divergence of model and reference, is estimated as in the paper: the mean of
    log(model / reference) over the window's prompts, each with the answer of another of its rows, and at least 0. It is
    the same for all passes of a window, and no gradient flows through it.
    """

    truncation: str
    beta: float
    desirable_weight: float
    undesirable_weight: float

    def prepare(self, path: Path, tokenizer: Any, max_seq_len: int) -> Prepared:
        return prepare_labelled(path, tokenizer, max_seq_len=max_seq_len, truncation=self.truncation)

    def weigh(self, examples: Sequence[Labelled]) -> int:
        return len(examples)

    def open_window(
        self, parallel: Parallel, examples: Sequence[Labelled], limit: PassLimit, stop_asked: Callable[[], bool]
    ) -> Window | None:
        moved = torch.zeros((), dtype=torch.float64, device=parallel.device)
        for part in share_passes(make_mismatched(examples), limit, parallel.data_ranks)[parallel.data_rank]:
            if stop_asked():
                return None
            with parallel.compute():
                measured = _measure(parallel.model, part.rows)
            if part.counts:
                moved += measured
        mean = float(parallel.total(moved)) / len(examples)
        # Compared this way round, a mean that is not a number stays one, and is told as such with the loss.
        return Window(self.weigh(examples), 0.0 if mean < 0 else mean)

    def score(self, model: nn.Module, examples: Sequence[Labelled], window: Window) -> Scores:
        rows = [example.row for example in examples]
        with judging(model, reference=True):
            reference = log_probabilities(model, rows, len(rows))
        logps = log_probabilities(model, rows, len(rows))
        ratios = logps - reference
        desirable = torch.tensor([example.is_desirable for example in examples], device=logps.device)
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = weights * compute_losses(ratios, desirable, window.reference_point, self.beta)
        sums = {"desirable": desirable.sum(), "undesirable": (~desirable).sum()}
        for side, chosen in {"chosen": desirable, "rejected": ~desirable}.items():
            sums[f"rewards_{side}"] = self.beta * ratios.detach()[chosen].sum()
            sums[f"logps_{side}"] = logps.detach()[chosen].sum()
        return Scores(losses.sum(), sums)

    def make_metrics(self, sums: Sums, window: Window) -> dict[str, float]:
        """A window without a row of one kind has no mean of it."""
        metrics = {"kl": window.reference_point}
        for side, count in {"chosen": sums["desirable"], "rejected": sums["undesirable"]}.items():
            if count:
                metrics[f"rewards_{side}"] = sums[f"rewards_{side}"] / count
                metrics[f"logps_{side}"] = sums[f"logps_{side}"] / count
        if "rewards_chosen" in metrics and "rewards_rejected" in metrics:
            metrics["reward_margin"] = metrics["rewards_chosen"] - metrics["rewards_rejected"]
        return metrics

    def make_evaluation(self, sums: Sums, window: Window) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in self.make_metrics(sums, window).items()}


def make_mismatched(examples: Sequence[Labelled]) -> list[Example]:
    """Each prompt with the answer of the row before it in the window; a row that is alone there takes that of the row
    after it in the file. Equal answers are as good as any."""
    if len(examples) == 1:
        return [examples[0].with_answer_of(examples[0].following)]
    before = [*examples[-1:], *examples[:-1]]
    return [example.with_answer_of(other.row) for example, other in zip(examples, before, strict=True)]


def compute_losses(ratios: Tensor, desirable: Tensor, reference_point: float, beta: float) -> Tensor:
    """The loss of the paper, one a row, before the weights. `ratios` are log(model / reference) of the answers."""
    gains = torch.where(desirable, ratios - reference_point, reference_point - ratios)
    return 1 - torch.sigmoid(beta * gains)


def _measure(model: nn.Module, rows: Sequence[Example]) -> Tensor:
    """log(model / reference), summed over the rows."""
    with judging(model):
        logps = log_probabilities(model, rows, len(rows))
    with judging(model, reference=True):
        return (logps - log_probabilities(model, rows, len(rows))).double().sum()
