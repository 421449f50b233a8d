"""The same bits each time on a GPU: a resumed run equals the uninterrupted one."""

from collections.abc import Callable

import torch
from torch import nn

from training.rank.data import Example
from training.rank.loss import make_batch, score
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState


def require_same_bits(model: nn.Module, train_once: Callable[[], object]) -> str | None:
    """Have torch take kernels only whose sums do not depend on the order in which threads come. Where one that
    `train_once`, a small pass forward and backward, needs has none such, it may take others; then says which.

    PyTorch's attention is among those that take another kernel only where they have to: to be warned is not enough
    (Memory Efficient and Flash Attention in aten/native/transformers/cuda/attention_backward.cu).
    """
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    random = RandomState.take()
    try:
        train_once()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        return str(error).split(",")[0].strip()
    finally:
        model.zero_grad(set_to_none=True)
        random.restore()
    return None


def warn_of_other_bits() -> None:
    """Where a trial is not possible: take kernels that repeat their bits as far as there are, and go on where not."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def train_once(parallel: Parallel, rows: int) -> None:
    """A small pass forward and backward, of one row or of two laid end to end."""
    row = Example(line=0, input_ids=list(range(3, 11)), labels=list(range(3, 11)))
    with parallel.compute():
        loss, _ = score(parallel.model, make_batch([row] * min(rows, 2), parallel.device))
    loss.backward()
