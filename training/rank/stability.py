"""Whether a step is sound: its loss and its gradient finite, its loss no spike against those of the steps before."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from torch import Tensor

from training.errors import TrainingError
from training.plan import Plan
from training.rank.checkpoint import Progress
from training.rank.data import Trained, sequences_of

WINDOW_STEPS = 50
"""The losses that a step is compared with."""

MIN_STEPS = 10
"""With fewer losses to compare with nothing is a spike."""

MAD_TO_SIGMA = 1.4826
"""The median distance from the median, times this, is the standard deviation where the losses are normal."""

MIN_SCALE = 0.02
"""Share of the median: losses that hardly differ make no spike of a small change."""

MAX_ROLLBACKS = 3
MAX_SKIPS_IN_A_ROW = 10
"""Then it is not the batches: the weights are broken, or the rate is too high for any of them."""

Action = Literal["report", "stop", "skip", "rollback"]


@dataclass(frozen=True)
class Measured:
    """A step after its passes, before it changes anything."""

    metrics: dict[str, float]
    passes: list[tuple[Sequence[Trained], Tensor]]
    "Rows, and their own mean loss."
    grad_norm: float

    @property
    def train_loss(self) -> float:
        return self.metrics["train_loss"]

    def lines_where(self, guilty: Callable[[float], bool]) -> tuple[int, ...]:
        """The lines of the rows whose own loss is at fault; of all rows where it is none in particular."""
        found = [rows for rows, mean in self.passes if guilty(float(mean))] or [rows for rows, _ in self.passes]
        # The sides of a pair stand on one line.
        return tuple(dict.fromkeys(row.line for rows in found for row in sequences_of(rows)))


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a step, and what is done about it. `lines` are those of the rows that look guilty."""

    step: int
    action: Action
    what: str
    lines: tuple[int, ...] = ()
    code: Literal["non_finite_loss", "non_finite_weights", "loss_spike"] = field(kw_only=True)

    @property
    def message(self) -> str:
        listed = ", ".join(str(line) for line in self.lines[:8]) + (", ..." if len(self.lines) > 8 else "")
        return self.what + (f" (rows of lines {listed})" if listed else "")

    def as_error(self, why: str = "") -> TrainingError:
        advice = "lower the learning_rate" + (", or look at these rows" if self.lines else "")
        return TrainingError(f"{self.message}{why}; {advice}", code=self.code)


def find_trouble(plan: Plan, progress: Progress, measured: Measured) -> Trouble | None:
    """Judge the step that comes after `progress`. One that made the run go back before and is no better at the lower
    rate is skipped: it is its rows."""
    step, loss = progress.step + 1, measured.train_loss
    again: Action | None = "skip" if step in progress.rolled_back_steps else None
    if not (math.isfinite(loss) and math.isfinite(measured.grad_norm)):
        what = f"the {'gradient' if math.isfinite(loss) else 'loss'} of step {step} is not finite"
        lines = measured.lines_where(lambda mean: not math.isfinite(mean))
        return Trouble(step, again or plan.stability.on_nan, what, lines, code="non_finite_loss")
    limit = spike_limit(progress.recent_losses, plan.stability.spike_factor)
    if limit is None or loss <= limit:
        return None
    what = f"the loss of step {step} is {loss:.4g}, where {median(progress.recent_losses):.4g} was usual"
    lines = measured.lines_where(lambda mean: mean > limit)
    return Trouble(step, again or plan.stability.on_spike, what, lines, code="loss_spike")


def goes_back(plan: Plan) -> bool:
    return "rollback" in (plan.stability.on_nan, plan.stability.on_spike)


def spike_limit(losses: Sequence[float], factor: float) -> float | None:
    """Median and median absolute deviation, which spikes of the past do not move; None where there are too few."""
    if len(losses) < MIN_STEPS:
        return None
    middle = median(losses)
    scale = MAD_TO_SIGMA * median(abs(loss - middle) for loss in losses)
    return middle + factor * max(scale, MIN_SCALE * abs(middle))


def note_step(progress: Progress, loss: float) -> None:
    """Remember a step that changed the weights."""
    progress.train_loss = loss
    progress.skips_in_a_row = 0
    progress.recent_losses = [*progress.recent_losses, loss][-WINDOW_STEPS:]
