"""Which rows are trained as one sequence. They never see each other: each has its own positions, beginning at 0."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.plan import make_max_seq_len
from training.rank.data import Prepared, sequences_of
from training.rank.sieve import Example
from training.spec import JobSpec


@dataclass(frozen=True)
class Pack:
    sequences: tuple[Example, ...]

    @property
    def line(self) -> int:
        return self.sequences[0].line

    @property
    def pass_tokens(self) -> int:
        return sum(sequence.pass_tokens for sequence in self.sequences)


def pack(prepared: Prepared, spec: JobSpec, context_tokens: int | None) -> Prepared:
    rows = sequences_of(prepared.examples)
    lengths = [len(row.input_ids) for row in rows]
    packs = make_packs(lengths, make_max_seq_len(spec, context_tokens, max(lengths)))
    return replace(prepared, examples=[Pack(tuple(rows[place] for place in places)) for places in packs])


def make_packs(lengths: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """The places of rows, in sequences of at most `limit` tokens: the longest first, each into the fullest sequence
    that has room, at most 22% and one more sequences than the fewest (Johnson 1973). None is left out; the last may be
    nearly empty."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect_left(rooms, (lengths[row], 0))
        if place == len(rooms):
            room, number = limit, len(packs)
            packs.append([])
        else:
            room, number = rooms.pop(place)
        packs[number].append(row)
        if room > lengths[row]:
            insort(rooms, (room - lengths[row], number))
    return [tuple(places) for places in packs]
