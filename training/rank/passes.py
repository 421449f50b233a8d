"""Which rows of a window go through the model together, laid end to end, and on which rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class Sized(Protocol):
    @property
    def pass_tokens(self) -> int:
        """How many tokens it takes of a pass."""


Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True)
class PassLimit:
    """How many rows a pass may have, and how many tokens all of them together; a row that has more is alone."""

    rows: int
    tokens: int | None = None


ROW_BY_ROW = PassLimit(1)


@dataclass(frozen=True)
class Pass(Generic[Row]):
    """Rows that go through the model together."""

    rows: Sequence[Row]
    counts: bool = True
    "False where a rank makes it only because others make one: its loss, and so its gradient, is taken as 0."


@dataclass(frozen=True)
class Scores:
    """Of one pass: the summed loss, and sums that metrics are made of."""

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)


def make_passes(rows: Sequence[Row], limit: PassLimit) -> Iterator[Sequence[Row]]:
    """All rows in their order, in as few passes as that allows."""
    begin = tokens = 0
    for place, row in enumerate(rows):
        is_full = place - begin == limit.rows or (limit.tokens is not None and tokens + row.pass_tokens > limit.tokens)
        if place > begin and is_full:
            yield rows[begin:place]
            begin, tokens = place, 0
        tokens += row.pass_tokens
    if rows:
        yield rows[begin:]


def share_passes(rows: Sequence[Row], limit: PassLimit, ranks: int) -> list[list[Pass[Row]]]:
    """The passes of each rank over a window: every row in one of them, and as many on each rank as on the others, since
    the ranks exchange something in every pass. A rank that has fewer takes the shortest row of the window once more,
    without counting it."""
    parts = [[Pass(part) for part in make_passes(own, limit)] for own in deal(rows, ranks)]
    longest = max(len(part) for part in parts)
    if longest:
        idle = Pass([min(rows, key=lambda row: row.pass_tokens)], counts=False)
        for part in parts:
            part += [idle] * (longest - len(part))
    return parts


def deal(rows: Sequence[Row], ranks: int) -> list[Sequence[Row]]:
    """The rows of each rank, in their order: equal numbers of them but for one, and about as many tokens. Each row, the
    longest first, goes where the fewest tokens are (Graham 1969)."""
    if ranks == 1:
        return [rows]
    most = -(-len(rows) // ranks)
    places: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(rows)), key=lambda place: -rows[place].pass_tokens):
        rank = min((rank for rank in range(ranks) if len(places[rank]) < most), key=lambda rank: tokens[rank])
        places[rank].append(place)
        tokens[rank] += rows[place].pass_tokens
    return [[rows[place] for place in sorted(own)] for own in places]
