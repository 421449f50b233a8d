"""Which encoded rows are trained within the limit of tokens, and what becomes of the others; none is lost uncounted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from training.errors import DataError
from training.facts import Counts
from training.rank.encoding import NO_LOSS, Encoded
from training.rows import RowIssue

LISTED_LINES = 5


@dataclass(frozen=True)
class Example:
    """A sequence as the model gets it. `labels[i]` belongs to token i: its id, or -100 where it carries no loss."""

    line: int
    input_ids: list[int]
    labels: list[int]

    @property
    def sequences(self) -> "tuple[Example, ...]":
        return (self,)

    @property
    def pass_tokens(self) -> int:
        return len(self.input_ids)


@dataclass
class _Lines:
    """How many rows something happened to, and the lines of the first."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.count += 1
        if len(self.first) < LISTED_LINES:
            self.first.append(line)

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 row (line {self.first[0]})"
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"{self.count} rows (lines {', '.join(map(str, self.first))}{more})"


class Sieve:
    """Takes the rows of a file one by one: `take` and `split` give what is trained of a row, or nothing."""

    def __init__(self, max_seq_len: int, truncation: str) -> None:
        self._limit = max_seq_len
        self._truncation = truncation
        self._rows = 0
        self._kept = 0
        self._cut, self._split, self._dropped, self._masked, self._spelled = (_Lines() for _ in range(5))

    def take(self, *sides: Encoded) -> tuple[Example, ...]:
        """The sides of a row, each cut at its own end. A row goes as a whole: not with a side that trains nothing.

        Raises:
            DataError: a side is too long and truncation is "error".
        """
        if not self._admit(*sides):
            return ()
        kept = tuple(Example(side.line, side.input_ids[: self._limit], side.labels[: self._limit]) for side in sides)
        return self._keep(kept, sides, self._cut)

    def split(self, row: Encoded) -> tuple[Example, ...]:
        """A row of any length in pieces. Each begins with the last token of the one before, which carries loss there:
        every token is trained once, and with something before it.

        Raises:
            DataError: as above.
        """
        if not self._admit(row):
            return ()
        starts = range(0, max(1, len(row.input_ids) - 1), self._limit - 1)
        pieces = tuple(
            Example(row.line, row.input_ids[start : start + self._limit], row.labels[start : start + self._limit])
            for start in starts
        )
        return self._keep(pieces, (row,), self._split)

    def _admit(self, *sides: Encoded) -> bool:
        self._rows += 1
        line, length = sides[0].line, max(len(side.input_ids) for side in sides)
        if length > self._limit and self._truncation == "error":
            raise DataError(
                f'line {line}: {length} tokens, more than max_seq_len {self._limit}, and truncation is "error"; '
                'shorten the row, raise max_seq_len, or set truncation to "truncate" or "drop"',
                code="too_many_tokens",
            )
        if length > self._limit and self._truncation == "drop":
            self._dropped.add(line)
            return False
        return True

    def _keep(self, kept: tuple[Example, ...], sides: Sequence[Encoded], cut: _Lines) -> tuple[Example, ...]:
        line = sides[0].line
        # Nothing comes before the first token, so it never carries loss.
        if any(all(label == NO_LOSS for label in example.labels[1:]) for example in kept):
            self._masked.add(line)
            return ()
        self._kept += 1
        if any(len(side.input_ids) > self._limit for side in sides):
            cut.add(line)
        if any(side.holds_spelled for side in sides):
            self._spelled.add(line)
        return kept

    def make_counts(self) -> Counts:
        return Counts(
            rows=self._rows,
            trained_rows=self._kept,
            truncated=self._cut.count,
            dropped=self._dropped.count + self._masked.count,
            masked=self._masked.count,
        )

    def make_warnings(self) -> list[RowIssue]:
        limit = f"{self._limit} tokens"
        told = (
            ("rows_truncated", self._cut, f"longer than {limit}, cut at the end"),
            ("rows_split", self._split, f"longer than {limit}, cut into pieces that are all trained"),
            ("rows_dropped", self._dropped, f"longer than {limit}, dropped"),
            ("rows_masked", self._masked, f"no trained token within {limit}, dropped"),
            ("control_token_as_text", self._spelled, "control tokens of the model in the data, trained as plain text"),
        )
        return [RowIssue(lines.first[0], "", code, f"{what}: {lines}") for code, lines, what in told if lines.count]

    def nothing_left(self) -> DataError:
        reasons = [
            f"{lines} {what}"
            for lines, what in (
                (self._dropped, 'longer than that, and truncation is "drop"'),
                (self._masked, "without a trained token within that"),
            )
            if lines.count
        ]
        return DataError(
            f"no row is left to train on at max_seq_len {self._limit} tokens: {'; '.join(reasons)}. "
            "Raise max_seq_len, shorten the prompts, or check train_on and the weights",
            code="nothing_to_train",
        )
