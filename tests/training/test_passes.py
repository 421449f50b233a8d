"""Every row has its pass, in its order, and no pass has more than is allowed."""

import random

import pytest

from training.rank.data import Pair
from training.rank.packing import Pack
from training.rank.passes import ROW_BY_ROW, PassLimit, make_passes
from training.rank.sieve import Example


def make_row(tokens: int) -> Example:
    return Example(1, [5] * tokens, [5] * tokens)


def lengths_of(lengths: list[int], limit: PassLimit) -> list[list[int]]:
    return [[row.pass_tokens for row in rows] for rows in make_passes([make_row(n) for n in lengths], limit)]


@pytest.mark.parametrize(
    ("limit", "passes"),
    [
        (ROW_BY_ROW, [[4], [3], [9], [1], [2], [2]]),
        (PassLimit(4), [[4, 3, 9, 1], [2, 2]]),
        (PassLimit(6, 8), [[4, 3], [9], [1, 2, 2]]),
        (PassLimit(2, 8), [[4, 3], [9], [1, 2], [2]]),
        (PassLimit(6, 1), [[4], [3], [9], [1], [2], [2]]),
        (PassLimit(6, 100), [[4, 3, 9, 1, 2, 2]]),
    ],
)
def test_passes_are_filled_in_order(limit: PassLimit, passes: list[list[int]]) -> None:
    assert lengths_of([4, 3, 9, 1, 2, 2], limit) == passes


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_and_no_limit_is_passed(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 50) for _ in range(draw.randint(0, 40))]
    rows, tokens = draw.randint(1, 10), draw.choice([None, draw.randint(1, 100)])
    passes = lengths_of(lengths, PassLimit(rows, tokens))
    assert [length for part in passes for length in part] == lengths
    for part in passes:
        assert 0 < len(part) <= rows
        assert tokens is None or len(part) == 1 or sum(part) <= tokens


def test_a_pair_takes_the_longer_of_its_sides_and_a_pack_all_its_rows() -> None:
    assert Pair(make_row(3), make_row(8)).pass_tokens == 8
    assert Pack((make_row(3), make_row(8))).pass_tokens == 11
