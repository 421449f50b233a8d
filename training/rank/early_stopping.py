"""When the validation loss falls no more, and where it was lowest."""

import math

from training.plan import Plan
from training.rank.checkpoint import Progress


def note_evaluation(progress: Progress, plan: Plan, loss: float) -> None:
    """Take an evaluation of the step that is done into account.

    The best step is the one with the lowest loss, the first of equal ones. A gain is a fall by more than `min_delta`
    since the last gain: many small ones add up.
    """
    if plan.early_stopping is None:
        return
    if math.isfinite(loss) and (progress.best_eval_loss is None or loss < progress.best_eval_loss):
        progress.best_step, progress.best_eval_loss = progress.step, loss
    last_gain = progress.last_gain_loss
    if math.isfinite(loss) and (last_gain is None or loss < last_gain - plan.early_stopping.min_delta):
        progress.last_gain_loss, progress.evaluations_without_gain = loss, 0
    else:
        progress.evaluations_without_gain += 1


def patience_is_out(progress: Progress, plan: Plan) -> bool:
    return plan.early_stopping is not None and progress.evaluations_without_gain >= plan.early_stopping.patience


def is_best(progress: Progress) -> bool:
    return progress.best_step == progress.step
