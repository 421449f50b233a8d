"""Which rows are trained when: a pure function of seed and step, whatever the devices and however often resumed."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")


@lru_cache(maxsize=2)
def make_order(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The rows of an epoch in their order: each one once, another order in each epoch."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(rows).tolist())


def make_window(rows: int, batch_size: int, seed: int, step: int) -> tuple[int, ...]:
    """The rows of optimizer step `step` (from 1). The last window of an epoch may be smaller: none is dropped, none is
    carried over."""
    epoch, place = divmod(step - 1, -(-rows // batch_size))
    return make_order(rows, seed, epoch)[place * batch_size : (place + 1) * batch_size]


def epochs_done(rows: int, batch_size: int, step: int) -> float:
    """Passes over the rows that are complete after step `step`."""
    epoch, place = divmod(step, -(-rows // batch_size))
    return epoch + min(place * batch_size, rows) / rows


def cut(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """The rows in groups of `size`, the last one maybe smaller."""
    return (rows[start : start + size] for start in range(0, len(rows), size))
