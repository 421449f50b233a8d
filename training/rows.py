"""Rows of a data file: which shape they have, and every bad one with its line, its place and what to do."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.errors import DataError
from training.jsonlines import Malformed, kind_of, read_objects
from training.messages import KNOWN_KEYS, get_text, make_messages, make_tools
from training.preferences import ANSWER_KEYS, MessagePair, TextPair, make_pair

REPORTED = 100
"""Errors, and warnings, that a report lists; it counts them all."""

_NAMES = {
    "chat": 'a chat row ("messages")',
    "prompt_completion": 'a prompt row ("prompt" and "completion")',
    "preference": "a preference row (a chosen and a rejected answer)",
    "text": 'a plain text row ("text")',
    "sharegpt": 'a ShareGPT row ("conversations")',
    "instruction": 'an instruction row ("instruction" and "output")',
    "rejected_response": 'a row of messages with a "rejected_response"',
}
_KEYS_OF = {"prompt_completion": {"prompt", "completion"}, "preference": {"chosen", "rejected", "prompt", "input"}}
"""Keys by which a row that lacks another of its shape is known in a file of that shape."""
_OFFERED = ("chat", "prompt_completion", "preference", "text")
_SHAPES_OF = {
    "supervised": ("chat", "prompt_completion"),
    "dpo": ("preference",),
    "kto": ("chat", "prompt_completion"),
    "pretrain": ("text",),
}
"""What each method is trained on."""

UNDERSTOOD = (
    'understood are chat rows ("messages"), prompt rows ("prompt" and "completion"), preference rows ("input", '
    '"preferred_output" and "non_preferred_output", or "chosen" and "rejected") and plain text rows ("text")'
)


@dataclass(frozen=True)
class RowIssue:
    """What is wrong, or worth knowing, at a line of the file and a path in its row."""

    line: int
    path: str
    code: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}{', ' if self.path else ''}{self.path}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Labels:
    """The labels that kto reads: rows with true and with false, and the first row that has neither."""

    desirable: int = 0
    undesirable: int = 0
    fault: RowIssue | None = None


@dataclass(frozen=True)
class Report:
    """A whole file looked through. `rows` counts lines that are not blank; a row has at most one error.

    `labels` is None where no row has one.
    """

    format: str | None
    rows: int
    errors: list[RowIssue]
    error_count: int
    warnings: list[RowIssue]
    labels: Labels | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ChatRow:
    """Messages and tools as a chat template takes them: content is one text, call arguments are objects.

    `weights` has one entry a message: 0, 1, or None where none was given.
    """

    line: int
    messages: list[dict[str, Any]]
    weights: list[int | None]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    line: int
    prompt: str
    completion: str


@dataclass(frozen=True)
class TextRow:
    line: int
    text: str


@dataclass(frozen=True)
class PairRow:
    """Two answers to one prompt, each side as a row of its own. In messages the weights mark the answer."""

    line: int
    chosen: ChatRow | PromptRow
    rejected: ChatRow | PromptRow


@dataclass(frozen=True)
class LabelledRow:
    """A row whose last answer is desirable or not."""

    line: int
    row: ChatRow | PromptRow
    is_desirable: bool


Row = ChatRow | PromptRow | TextRow | PairRow | LabelledRow


def make_report(path: Path) -> Report:
    """Look through a whole file; bad content never raises."""
    reader, rows, error_count = _Reader(), 0, 0
    errors: list[RowIssue] = []
    for found in reader.read(path):
        rows += 1
        if isinstance(found, RowIssue):
            error_count += 1
            if len(errors) < REPORTED:
                errors.append(found)
    rows = 0 if reader.is_no_rows else rows
    labels = reader.labels if reader.has_labels else None
    return Report(reader.format, rows, errors, error_count, reader.warnings, labels)


def find_misuse(method: str, report: Mapping[str, Any]) -> RowIssue | None:
    """Why a job of this method cannot be trained on a file with this report; line 0 means the whole file."""
    shape = report.get("format")
    if shape in _OFFERED and shape not in _SHAPES_OF[method]:
        return RowIssue(0, "", "wrong_format", _wrong_format(method, shape))
    if method != "kto" or "labels" not in report:
        return None
    if report["labels"] is None:
        return RowIssue(0, "", "missing_label", 'no row has a "label"; kto needs true or false in each')
    fault = report["labels"]["fault"]
    return RowIssue(**fault) if fault else None


def read_rows(path: Path, warnings: list[RowIssue] | None = None, *, method: str | None = None) -> Iterator[Row]:
    """The rows of a file one by one; what is worth a warning is added to `warnings`.

    With a method, rows that it is not trained on are bad too; those of kto come with their labels.

    Raises:
        DataError: at the first bad row; its message begins with the place, such as `line 2, messages[1].content: `.
    """
    for found in _Reader(warnings, method).read(path):
        if isinstance(found, RowIssue):
            raise DataError(str(found), code=found.code)
        yield found


class _Reader:
    """Reads one file; remembers the shape of its rows, its labels, and what to warn of."""

    def __init__(self, warnings: list[RowIssue] | None = None, method: str | None = None) -> None:
        self.format: str | None = None
        self.is_no_rows = False
        self.warnings = [] if warnings is None else warnings
        self.labels = Labels()
        self.has_labels = False
        self._method = method
        self._format_line = 0
        self._warned: set[tuple[str, str]] = set()

    def read(self, path: Path) -> Iterator[Row | RowIssue]:
        for line, value in read_objects(path):
            try:
                if isinstance(value, Malformed):
                    raise self._of_whole_file(value)
                yield self._make_row(line, value)
            except Malformed as bad:
                yield RowIssue(line, bad.path, bad.code, bad.message)

    def _of_whole_file(self, bad: Malformed) -> Malformed:
        """A fault of the bytes; of an array also what its first example is, where that would be refused next."""
        self.is_no_rows = bad.is_whole_file
        if not isinstance(bad.example, dict):
            return bad
        self.format = _find_shape(bad.example)
        if self.format in _OFFERED:
            return bad
        return Malformed(bad.code, f"{bad.message}. Its rows besides: {_refusal_of(bad.example).message}")

    def _make_row(self, line: int, value: dict[str, Any]) -> Row:
        shape = self._settle_shape(line, value)
        if self._method is not None and shape not in _SHAPES_OF[self._method]:
            raise Malformed("wrong_format", _wrong_format(self._method, shape))
        if shape == "text":
            return _make_text_row(line, value)
        if shape == "preference":
            return self._make_pair_row(line, value)
        row = _make_chat_row(line, value) if shape == "chat" else _make_prompt_row(line, value)
        if isinstance(row, ChatRow):
            self._warn_of_unknown_keys(line, "messages", row.messages)
        if self._method == "kto":
            return LabelledRow(line, row, _get_label(value))
        self._note_label(line, value)
        return row

    def _make_pair_row(self, line: int, value: dict[str, Any]) -> PairRow:
        pair = make_pair(value)
        if isinstance(pair, TextPair):
            chosen, rejected = (PromptRow(line, pair.prompt, answer) for answer in (pair.chosen, pair.rejected))
            return PairRow(line, chosen, rejected)
        for place, messages in pair.places.items():
            self._warn_of_unknown_keys(line, place, messages)
        return PairRow(line, _answer(line, pair, pair.chosen), _answer(line, pair, pair.rejected))

    def _note_label(self, line: int, value: dict[str, Any]) -> None:
        self.has_labels = self.has_labels or "label" in value
        try:
            is_desirable = _get_label(value)
        except Malformed as bad:
            fault = self.labels.fault or RowIssue(line, bad.path, bad.code, bad.message)
            self.labels = replace(self.labels, fault=fault)
            return
        desirable, undesirable = self.labels.desirable + is_desirable, self.labels.undesirable + (not is_desirable)
        self.labels = replace(self.labels, desirable=desirable, undesirable=undesirable)
        told = "only kto reads labels: other methods train what is labelled false like the rest"
        self._warn(RowIssue(line, "label", "label_ignored", told))

    def _settle_shape(self, line: int, value: dict[str, Any]) -> str:
        """The shape of a row; one file holds one shape, that of its first row."""
        shape = _find_shape(value)
        if self.format is None and shape is not None:
            self.format, self._format_line = shape, line
        if shape not in _OFFERED and self.format is not None and value.keys() & _KEYS_OF.get(self.format, set()):
            return self.format
        if shape not in _OFFERED:
            raise _refusal_of(value)
        if shape != self.format:
            was = f"{_NAMES[str(self.format)]}, as line {self._format_line} is"
            message = f"this row is {_NAMES[shape]}, the file is {was}; put each shape into a file of its own"
            raise Malformed("mixed_shapes", message)
        return shape

    def _warn_of_unknown_keys(self, line: int, place: str, messages: list[dict[str, Any]]) -> None:
        for index, message in enumerate(messages):
            for key in [key for key in message if key not in KNOWN_KEYS]:
                known = ", ".join(KNOWN_KEYS)
                told = f"unknown key, given to the chat template, which may not read it; known are {known}"
                self._warn(RowIssue(line, f"{place}[{index}].{key}", "unknown_key", told), key)

    def _warn(self, issue: RowIssue, key: str = "") -> None:
        """Warn once of each kind and key: a file has them in every row."""
        if (issue.code, key) not in self._warned and len(self.warnings) < REPORTED:
            self._warned.add((issue.code, key))
            self.warnings.append(issue)


def _find_shape(value: dict[str, Any]) -> str | None:
    """By the keys that a shape needs; other keys never decide."""
    keys = value.keys()
    if {"chosen", "rejected"} <= keys or keys & ANSWER_KEYS:
        return "preference"
    if "rejected_response" in keys:
        return "rejected_response"
    if "messages" in keys:
        return "chat"
    if {"prompt", "completion"} <= keys:
        return "prompt_completion"
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if {"instruction", "output"} <= keys:
        return "instruction"
    return "text" if "text" in keys else None


def _refusal_of(value: dict[str, Any]) -> Malformed:
    shape = _find_shape(value)
    if shape is not None:
        return Malformed("shape_not_offered", f"{_NAMES[shape]} is not offered yet; {UNDERSTOOD}")
    keys = ", ".join(f'"{key[:40]}"' for key in list(value)[:20])
    return Malformed("unknown_shape", f"no known columns, found {keys or 'none'}; {UNDERSTOOD}")


def _make_chat_row(line: int, value: dict[str, Any]) -> ChatRow:
    messages = make_messages(value["messages"])
    weights = [int(message.pop("weight")) if "weight" in message else None for message in messages]
    return ChatRow(line, messages, weights, make_tools(value.get("tools")))


def _answer(line: int, pair: MessagePair, answer: list[dict[str, Any]]) -> ChatRow:
    weights: list[int | None] = [0 if message["role"] == "assistant" else None for message in pair.prompt]
    weights += [1 if message["role"] == "assistant" else None for message in answer]
    return ChatRow(line, [*pair.prompt, *answer], weights, pair.tools)


def _make_text_row(line: int, value: dict[str, Any]) -> TextRow:
    text = get_text(value["text"], "text")
    if not text.strip():
        raise Malformed("nothing_to_learn", "the text is empty: nothing to learn", "text")
    return TextRow(line, text)


def _get_label(value: dict[str, Any]) -> bool:
    if "label" not in value:
        raise Malformed("missing_label", "missing, true or false expected", "label")
    label = value["label"]
    if not isinstance(label, bool):
        raise Malformed("invalid_label", f"{kind_of(label)}, true or false expected", "label")
    return label


def _wrong_format(method: str, shape: str) -> str:
    wanted = " or ".join(_NAMES[name] for name in _SHAPES_OF[method])
    users = " or ".join(name for name, shapes in _SHAPES_OF.items() if shape in shapes)
    return f"{_NAMES[shape]} is for method.type {users}; {method} is trained on {wanted}"


def _make_prompt_row(line: int, value: dict[str, Any]) -> PromptRow:
    for key in ("prompt", "completion"):
        if key not in value:
            raise Malformed("missing_field", "missing, text expected", key)
        if isinstance(value[key], list):
            raise Malformed("wrong_type", 'a list, text expected; conversations go into "messages"', key)
    prompt, completion = get_text(value["prompt"], "prompt"), get_text(value["completion"], "completion")
    if not completion.strip():
        raise Malformed("nothing_to_learn", "the completion is empty: nothing to learn", "completion")
    return PromptRow(line, prompt, completion)
