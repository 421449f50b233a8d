"""Every row has its pass, in its order, and no pass has more than is allowed."""

import random

import pytest

from training.rank.data import Pair
from training.rank.packing import Pack
from training.rank.passes import ROW_BY_ROW, PassLimit, deal, make_passes, share_passes
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


# Shared among ranks


@pytest.mark.parametrize("seed", range(50))
def test_every_row_is_dealt_to_one_rank(seed: int) -> None:
    """And in its order: each rank has as many rows as the others but for one, no limit is passed."""
    draw = random.Random(seed)
    rows = [Example(line, [5] * (size := draw.randint(1, 50)), [5] * size) for line in range(draw.randint(1, 40))]
    ranks, limit = draw.randint(1, 9), PassLimit(draw.randint(1, 4), draw.choice([None, draw.randint(1, 100)]))
    shares = share_passes(rows, limit, ranks)
    assert len(shares) == ranks
    assert len({len(passes) for passes in shares}) == 1, "each rank makes as many passes"
    counted = [[row.line for part in passes if part.counts for row in part.rows] for passes in shares]
    assert sorted(line for lines in counted for line in lines) == list(range(len(rows)))
    assert all(lines == sorted(lines) for lines in counted)
    assert max(map(len, counted)) == -(-len(rows) // ranks)
    assert all(0 < len(part.rows) <= limit.rows for passes in shares for part in passes)
    shortest = min(len(row.input_ids) for row in rows)
    idle = [part for passes in shares for part in passes if not part.counts]
    assert all([len(row.input_ids) for row in part.rows] == [shortest] for part in idle)
    assert shares == share_passes(rows, limit, ranks), "every rank comes to the same"


def test_ranks_get_about_as_many_tokens() -> None:
    lengths = [90, 10, 10, 10, 50, 40, 30, 60]
    shares = deal([make_row(length) for length in lengths], 2)
    assert [[row.pass_tokens for row in rows] for rows in shares] == [[90, 10, 10, 40], [10, 50, 30, 60]]


def test_one_rank_makes_the_passes_of_before() -> None:
    rows = [make_row(length) for length in (4, 3, 9, 1, 2, 2)]
    (passes,) = share_passes(rows, PassLimit(6, 8), 1)
    assert [part.rows for part in passes] == list(make_passes(rows, PassLimit(6, 8)))
    assert all(part.counts for part in passes)
