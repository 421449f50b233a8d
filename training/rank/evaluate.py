"""The loss and other metrics on rows that are not trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from training.rank.data import Trained
from training.rank.objective import Objective, Totals
from training.rank.parallel import Parallel
from training.rank.passes import PassLimit, share_passes
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
    limit: PassLimit,
    stop_asked: Callable[[], bool],
) -> Evaluation | None:
    """Evaluate without dropout; the train mode and the random numbers of the training stay as they were. None where a
    stop was asked for on the way."""
    model, training = parallel.model, parallel.model.training
    random = RandomState.take()
    totals = Totals()
    model.eval()
    try:
        window = objective.open_window(parallel, examples, limit, stop_asked)
        if window is None:
            return None
        own = share_passes(examples, limit, parallel.data_ranks)[parallel.data_rank]
        scores = parallel.score_passes(own, partial(objective.score, model, window=window))
        for part in own:
            if stop_asked():
                return None
            totals.add(next(scores), part)
    finally:
        model.train(training)
        random.restore()
    sums, _ = totals.over_ranks(parallel)
    return Evaluation(sums["loss"] / window.weight, objective.make_evaluation(sums, window))
