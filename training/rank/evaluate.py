"""The loss and other metrics on rows that are not trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.rank.data import Trained
from training.rank.objective import Objective, Totals
from training.rank.order import cut
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState


@dataclass(frozen=True)
class Evaluation:
    """Means over all rows, however they are cut into passes; what they are weighed by is the objective's."""

    loss: float
    metrics: dict[str, float]


@torch.no_grad()
def evaluate(
    objective: Objective,
    parallel: Parallel,
    examples: Sequence[Trained],
    rows_per_pass: int,
    stop_asked: Callable[[], bool],
) -> Evaluation | None:
    """Evaluate without dropout; the train mode and the random numbers of the training stay as they were. None where a
    stop was asked for on the way."""
    model, training = parallel.model, parallel.model.training
    random = RandomState.take()
    totals = Totals()
    model.eval()
    try:
        window = objective.open_window(parallel, examples, rows_per_pass, stop_asked)
        if window is None:
            return None
        for rows in cut(examples, rows_per_pass):
            if stop_asked():
                return None
            with parallel.compute():
                totals.add(objective.score(model, rows, window))
    finally:
        model.train(training)
        random.restore()
    sums = totals.over_ranks(parallel)
    return Evaluation(sums["loss"] / window.weight, objective.make_evaluation(sums, window))
