"""The loss and the accuracy on rows that are not trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.rank.data import Example
from training.rank.loss import count_trained, make_batch, score
from training.rank.order import cut
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState


@dataclass(frozen=True)
class Evaluation:
    """Means over the trained tokens of all rows, so that neither rows nor batches weigh in."""

    loss: float
    token_accuracy: float


@torch.no_grad()
def evaluate(
    parallel: Parallel, examples: Sequence[Example], rows_per_pass: int, stop_asked: Callable[[], bool]
) -> Evaluation | None:
    """Evaluate without dropout; the train mode and the random numbers of the training stay as they were. None where a
    stop was asked for on the way."""
    model, training = parallel.model, parallel.model.training
    random = RandomState.take()
    loss, right = (torch.zeros((), dtype=torch.float64, device=parallel.device) for _ in range(2))
    model.eval()
    try:
        for rows in cut(examples, rows_per_pass):
            if stop_asked():
                return None
            with parallel.compute():
                row_loss, row_right = score(model, make_batch(rows, parallel.device))
            loss += row_loss
            right += row_right
    finally:
        model.train(training)
        random.restore()
    trained = count_trained(examples)
    return Evaluation(float(parallel.total(loss)) / trained, float(parallel.total(right)) / trained)
