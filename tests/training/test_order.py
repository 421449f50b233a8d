"""Each epoch has each row once, in an order that depends on the seed and the epoch alone."""

import pytest

from training.rank.order import cut, epochs_done, make_order, make_window

ROWS, BATCH = 10, 4


def windows_of(epoch: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    first = 1 + 3 * epoch
    return [make_window(ROWS, BATCH, seed, step) for step in range(first, first + 3)]


@pytest.mark.parametrize("epoch", range(4))
def test_each_row_comes_once_an_epoch_and_the_last_window_is_smaller(epoch: int) -> None:
    windows = windows_of(epoch)
    assert [len(window) for window in windows] == [4, 4, 2]
    assert sorted(row for window in windows for row in window) == list(range(ROWS))


def test_epochs_differ_and_seeds_differ() -> None:
    orders = {make_order(100, seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_a_step_has_its_rows_whatever_was_asked_before() -> None:
    expected = [make_window(ROWS, BATCH, 7, step) for step in range(1, 13)]
    make_order.cache_clear()
    assert [make_window(ROWS, BATCH, 7, step) for step in range(12, 0, -1)] == expected[::-1]


def test_the_order_stays_what_it_was_for_runs_that_are_gone_on_with_after_an_upgrade() -> None:
    assert make_order(8, 0, 0) == (2, 4, 3, 6, 5, 0, 1, 7)
    assert make_order(8, 0, 1) == (1, 3, 7, 6, 0, 4, 2, 5)


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    assert sorted(make_window(3, 8, 0, 1)) == [0, 1, 2]
    assert sorted(make_window(3, 8, 0, 2)) == [0, 1, 2]


def test_epochs_are_counted_in_rows() -> None:
    assert [epochs_done(ROWS, BATCH, step) for step in range(7)] == [0, 0.4, 0.8, 1.0, 1.4, 1.8, 2.0]


def test_a_window_is_cut_into_passes_without_losing_a_row() -> None:
    assert [list(part) for part in cut([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
