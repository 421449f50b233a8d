"""From the rows of a file to token ids and labels, ready to train; no row is lost without being counted."""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from training.errors import DataError
from training.plan import Counts
from training.rank.control_tokens import ControlTokens
from training.rank.encoding import NO_LOSS, Encoded, Encoder
from training.rank.rendering import Renderer
from training.rows import RowIssue, read_rows

LISTED_LINES = 5


@dataclass(frozen=True)
class Example:
    """A row as the model gets it. `labels[i]` belongs to token i: its id, or -100 where it carries no loss."""

    line: int
    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Prepared:
    examples: list[Example]
    counts: Counts
    warnings: list[RowIssue]


def prepare(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int, truncation: str, train_on: str
) -> Prepared:
    """Read, render and encode a file.

    Chat rows get the ids of `tokenizer.apply_chat_template`, so no second begin-of-text token. The turn of a trained
    answer carries loss from its first token to its stop token; a message's own weight of 0 or 1 wins over `train_on`.

    Raises:
        DataError: a bad row, a row that is too long with truncation "error", or a file with nothing to train.
        ModelError: chat rows, and the model has no chat template.
    """
    warnings: list[RowIssue] = []
    controls = ControlTokens(tokenizer)
    renderer = Renderer(tokenizer, controls, train_on)
    drafts = (renderer.make_draft(row) for row in read_rows(path, warnings))
    sieve = _Sieve(max_seq_len, truncation)
    for encoded in Encoder(tokenizer, controls).encode(drafts):
        sieve.take(encoded)
    if not sieve.examples:
        raise sieve.nothing_left()
    return Prepared(sieve.examples, sieve.make_counts(), warnings + sieve.make_warnings())


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


class _Sieve:
    """Keeps the rows that can be trained within the limit, and counts what happens to the others."""

    def __init__(self, max_seq_len: int, truncation: str) -> None:
        self._limit = max_seq_len
        self._truncation = truncation
        self.examples: list[Example] = []
        self._rows = 0
        self._cut, self._dropped, self._masked, self._spelled = _Lines(), _Lines(), _Lines(), _Lines()

    def take(self, row: Encoded) -> None:
        """Raises DataError for a row that is too long with truncation "error"."""
        self._rows += 1
        length = len(row.input_ids)
        if length > self._limit and self._truncation == "error":
            raise DataError(
                f'line {row.line}: {length} tokens, more than max_seq_len {self._limit}, and truncation is "error"; '
                'shorten the row, raise max_seq_len, or set truncation to "truncate" or "drop"',
                code="too_many_tokens",
            )
        if length > self._limit and self._truncation == "drop":
            self._dropped.add(row.line)
            return
        example = Example(row.line, row.input_ids[: self._limit], row.labels[: self._limit])
        # Nothing comes before the first token, so it never carries loss.
        if all(label == NO_LOSS for label in example.labels[1:]):
            self._masked.add(row.line)
            return
        self.examples.append(example)
        if length > self._limit:
            self._cut.add(row.line)
        if row.holds_spelled:
            self._spelled.add(row.line)

    def make_counts(self) -> Counts:
        return Counts(
            rows=self._rows,
            trained_rows=len(self.examples),
            truncated=self._cut.count,
            dropped=self._dropped.count + self._masked.count,
            masked=self._masked.count,
        )

    def make_warnings(self) -> list[RowIssue]:
        limit = f"{self._limit} tokens"
        told = (
            ("rows_truncated", self._cut, f"longer than {limit}, cut at the end"),
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
