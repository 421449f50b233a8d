"""From the rows of a file to token ids and labels, ready to train, for each method."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from training.errors import DataError
from training.facts import Counts
from training.rank.control_tokens import ControlTokens
from training.rank.encoding import NO_LOSS, Encoded, Encoder
from training.rank.rendering import Draft, Renderer
from training.rank.sieve import Example, Sieve
from training.rows import LabelledRow, PairRow, RowIssue, read_rows


class Trained(Protocol):
    """What a batch is made of: a row, or two that belong together."""

    @property
    def line(self) -> int: ...

    @property
    def sequences(self) -> tuple[Example, ...]: ...

    @property
    def pass_tokens(self) -> int:
        """How many tokens it takes of a pass."""


@dataclass(frozen=True)
class Pair:
    """Two answers after the same prompt tokens."""

    chosen: Example
    rejected: Example

    @property
    def line(self) -> int:
        return self.chosen.line

    @property
    def sequences(self) -> tuple[Example, ...]:
        return self.chosen, self.rejected

    @property
    def pass_tokens(self) -> int:
        """Chosen and rejected sides have passes of their own."""
        return max(self.chosen.pass_tokens, self.rejected.pass_tokens)


@dataclass(frozen=True)
class Labelled:
    """An answer that is desirable or not. `following` is the row after it in the file, after the last one the first."""

    row: Example
    is_desirable: bool
    following: Example
    max_seq_len: int

    @property
    def line(self) -> int:
        return self.row.line

    @property
    def sequences(self) -> tuple[Example, ...]:
        return (self.row,)

    @property
    def pass_tokens(self) -> int:
        return self.row.pass_tokens

    def with_answer_of(self, other: Example) -> Example:
        """The prompt of this row with the answer of another, cut as all rows are. Something of that is left, since
        something was left of this row's own answer."""
        prompt = find_answer(self.row)
        answer = slice(find_answer(other), None)
        ids = self.row.input_ids[:prompt] + other.input_ids[answer]
        labels = [NO_LOSS] * prompt + other.labels[answer]
        return Example(self.line, ids[: self.max_seq_len], labels[: self.max_seq_len])


@dataclass(frozen=True)
class Prepared:
    examples: Sequence[Trained]
    counts: Counts
    warnings: list[RowIssue]


def prepare(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int, truncation: str, train_on: str
) -> Prepared:
    """Read, render and encode chat or prompt rows.

    Chat rows get the ids of `tokenizer.apply_chat_template`, so no second begin-of-text token. The turn of a trained
    answer carries loss from its first token to its stop token; a message's own weight of 0 or 1 wins over `train_on`.

    Raises:
        DataError: a bad row, a row that is too long with truncation "error", or a file with nothing to train.
        ModelError: chat rows, and the model has no chat template.
    """
    reading = _Reading(tokenizer, max_seq_len, truncation, train_on)
    drafts = (reading.draft(row) for row in read_rows(path, reading.warnings, method="supervised"))
    return reading.finish([example for row in reading.encode(drafts) for example in reading.sieve.take(row)])


def prepare_texts(path: Path, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int, truncation: str) -> Prepared:
    """Texts between the begin-of-text and the end-of-text token, every token with loss but the first. With truncation
    "truncate" a long one is cut into pieces, none of which is lost.

    Raises:
        DataError: as above.
    """
    reading = _Reading(tokenizer, max_seq_len, truncation, "all")
    drafts = (reading.draft(row) for row in read_rows(path, reading.warnings, method="pretrain"))
    return reading.finish([example for row in reading.encode(drafts) for example in reading.sieve.split(row)])


def prepare_pairs(path: Path, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int, truncation: str) -> Prepared:
    """Pairs of answers: both sides have the same prompt tokens, and each is cut on its own. A pair with a side that
    would train nothing is dropped.

    Raises:
        DataError, ModelError: as above.
    """
    reading = _Reading(tokenizer, max_seq_len, truncation, "assistant")

    def drafts() -> Iterator[Draft]:
        for row in read_rows(path, reading.warnings, method="dpo"):
            assert isinstance(row, PairRow)  # noqa: S101 - dpo is trained on no others
            yield reading.draft(row.chosen)
            yield reading.draft(row.rejected)

    sides = reading.encode(drafts())
    pairs = []
    for chosen, rejected in zip(sides, sides, strict=True):
        _require_one_prompt(chosen, rejected)
        if kept := reading.sieve.take(chosen, rejected):
            pairs.append(Pair(*kept))
    return reading.finish(pairs)


def prepare_labelled(path: Path, tokenizer: PreTrainedTokenizerBase, *, max_seq_len: int, truncation: str) -> Prepared:
    """Rows whose last answer is desirable or not; that answer carries the loss, whatever the weights.

    Raises:
        DataError: also where fewer than two rows are left.
        ModelError: as above.
    """
    reading = _Reading(tokenizer, max_seq_len, truncation, "last")
    labels: deque[bool] = deque()

    def drafts() -> Iterator[Draft]:
        for row in read_rows(path, reading.warnings, method="kto"):
            assert isinstance(row, LabelledRow)  # noqa: S101 - kto is trained on no others
            labels.append(row.is_desirable)
            yield reading.draft(row.row)

    kept = []
    for encoded in reading.encode(drafts()):
        is_desirable = labels.popleft()
        kept += [(example, is_desirable) for example in reading.sieve.take(encoded)]
    following = [example for example, _ in kept[1:] + kept[:1]]
    prepared = reading.finish(
        [Labelled(*labelled, after, max_seq_len) for labelled, after in zip(kept, following, strict=True)],
        desirable=sum(label for _, label in kept),
        undesirable=sum(not label for _, label in kept),
    )
    if len(kept) < 2:
        message = "kto needs at least two rows: it measures how far the model has moved on answers to other prompts"
        raise DataError(message, code="too_few_rows")
    return prepared


def sequences_of(examples: Sequence[Trained]) -> list[Example]:
    return [sequence for example in examples for sequence in example.sequences]


def find_answer(row: Example | Encoded) -> int:
    """Where the first token stands that carries loss."""
    return next((place for place, label in enumerate(row.labels) if label != NO_LOSS), len(row.labels))


class _Reading:
    """The way of one file through rendering, encoding and sieve."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, truncation: str, train_on: str) -> None:
        controls = ControlTokens(tokenizer)
        self.warnings: list[RowIssue] = []
        self.sieve = Sieve(max_seq_len, truncation)
        self.draft = Renderer(tokenizer, controls, train_on).make_draft
        self.encode = Encoder(tokenizer, controls).encode

    def finish(self, examples: Sequence[Trained], **labels: int) -> Prepared:
        if not examples:
            raise self.sieve.nothing_left()
        counts = self.sieve.make_counts().model_copy(update=labels)
        return Prepared(examples, counts, self.warnings + self.sieve.make_warnings())


def _require_one_prompt(chosen: Encoded, rejected: Encoded) -> None:
    """Templates may write a turn otherwise by what follows it. Then the two answers would be judged apart."""
    if _prompt(chosen) != _prompt(rejected):
        raise DataError(
            f"line {chosen.line}: the model's chat template writes the prompt of the two answers differently; "
            "change the row, or choose another model",
            code="template_error",
        )


def _prompt(side: Encoded) -> list[int]:
    """The tokens before the first one that carries loss."""
    return side.input_ids[: find_answer(side)]
