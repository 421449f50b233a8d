"""Rows of a data file: which shape they have, and every bad one with its line, its place and what to do."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.errors import DataError
from training.jsonlines import Malformed, read_objects
from training.messages import KNOWN_KEYS, get_text, make_messages, make_tools

REPORTED = 100
"""Errors, and warnings, that a report lists; it counts them all."""

UNDERSTOOD = 'understood are chat rows ("messages") and prompt rows ("prompt" and "completion")'

_NAMES = {
    "chat": 'a chat row ("messages")',
    "prompt_completion": 'a prompt row ("prompt" and "completion")',
    "sharegpt": 'a ShareGPT row ("conversations")',
    "preference": "a preference row (a chosen and a rejected answer)",
    "instruction": 'an instruction row ("instruction" and "output")',
    "text": 'a plain text row ("text")',
}
_OFFERED = ("chat", "prompt_completion")
_PREFERENCE_KEYS = {"preferred_output", "non_preferred_output", "rejected_response"}


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
class Report:
    """A whole file looked through. `rows` counts lines that are not blank; a row has at most one error."""

    format: str | None
    rows: int
    errors: list[RowIssue]
    error_count: int
    warnings: list[RowIssue]

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


Row = ChatRow | PromptRow


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
    return Report(reader.format, rows, errors, error_count, reader.warnings)


def read_rows(path: Path, warnings: list[RowIssue] | None = None) -> Iterator[Row]:
    """The rows of a file one by one; what is worth a warning is added to `warnings`.

    Raises:
        DataError: at the first bad row; its message begins with the place, such as `line 2, messages[1].content: `.
    """
    reader = _Reader(warnings)
    for found in reader.read(path):
        if isinstance(found, RowIssue):
            raise DataError(str(found), code=found.code)
        yield found


class _Reader:
    """Reads one file; remembers the shape of its rows and what to warn of."""

    def __init__(self, warnings: list[RowIssue] | None = None) -> None:
        self.format: str | None = None
        self.is_no_rows = False
        self.warnings = [] if warnings is None else warnings
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
        row = _make_chat_row(line, value) if shape == "chat" else _make_prompt_row(line, value)
        if isinstance(row, ChatRow):
            self._warn_of_unknown_keys(row)
        if isinstance(value.get("label"), bool):
            message = "labels are ignored: what is labelled false is trained like the rest"
            self._warn(RowIssue(line, "label", "label_ignored", message))
        return row

    def _settle_shape(self, line: int, value: dict[str, Any]) -> str:
        """The shape of a row; one file holds one shape, that of its first row."""
        shape = _find_shape(value)
        if self.format is None and shape is not None:
            self.format, self._format_line = shape, line
        if (
            shape not in _OFFERED
            and self.format == "prompt_completion"
            and ("prompt" in value or "completion" in value)
        ):
            return "prompt_completion"
        if shape not in _OFFERED:
            raise _refusal_of(value)
        if shape != self.format:
            was = f"{_NAMES[str(self.format)]}, as line {self._format_line} is"
            message = f"this row is {_NAMES[shape]}, the file is {was}; put each shape into a file of its own"
            raise Malformed("mixed_shapes", message)
        return shape

    def _warn_of_unknown_keys(self, row: ChatRow) -> None:
        for index, message in enumerate(row.messages):
            for key in [key for key in message if key not in KNOWN_KEYS]:
                known = ", ".join(KNOWN_KEYS)
                told = f"unknown key, given to the chat template, which may not read it; known are {known}"
                self._warn(RowIssue(row.line, f"messages[{index}].{key}", "unknown_key", told), key)

    def _warn(self, issue: RowIssue, key: str = "") -> None:
        """Warn once of each kind and key: a file has them in every row."""
        if (issue.code, key) not in self._warned and len(self.warnings) < REPORTED:
            self._warned.add((issue.code, key))
            self.warnings.append(issue)


def _find_shape(value: dict[str, Any]) -> str | None:
    """By the keys that a shape needs; other keys never decide."""
    keys = value.keys()
    if {"chosen", "rejected"} <= keys or keys & _PREFERENCE_KEYS:
        return "preference"
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
