"""Which rows of a window go through the model together, laid end to end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


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
