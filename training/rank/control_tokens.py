"""Tokens that structure a chat, kept apart from data that merely spells them.

Data is taken as plain text, never as structure: "<|im_end|>" in a user's words must not end a turn. It is not refused,
since harmless words such as "<filename>" or "<s>" are control tokens of some models and one of them would turn a whole
file away. Before a template sees a row, each spelled token is replaced by a stand-in; only when the rendered text is
encoded does the spelling come back, piece by piece and as ordinary text.
"""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.errors import DataError

# Code points that Unicode reserves for use inside programs; a stand-in is four of them, a number in base 16.
_DIGITS = "".join(chr(0xFDD0 + digit) for digit in range(16))
_STAND_IN = re.compile(f"([{_DIGITS}]{{4}})")
_PROBE = [{"role": role, "content": word} for role, word in (("user", "a"), ("assistant", "b"), ("user", "c"))]


class ControlTokens:
    """The control tokens of one tokenizer; `all` has the longest first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.all = tuple(sorted(_find(tokenizer), key=lambda token: (-len(token), token)))
        any_token = "|".join(map(re.escape, self.all)) or "(?!)"
        self._next_stop = re.compile(rf"\s*(?:{any_token})")
        # Digits that stand in the data themselves are quoted too, so that no data can forge a stand-in.
        self._quoted = (*self.all, *_DIGITS)
        self._numbers = {text: number for number, text in enumerate(self._quoted)}
        self._to_quote = re.compile(f"{any_token}|[{_DIGITS}]")
        self._as_text: dict[str, list[int]] = {}

    def quote(self, value: Any) -> Any:
        """The value with a stand-in for each control token that a text or key in it spells."""
        if isinstance(value, str):
            return self._to_quote.sub(lambda match: _make_stand_in(self._numbers[match[0]]), value)
        if isinstance(value, dict):
            return {self.quote(key): self.quote(item) for key, item in value.items()}
        return [self.quote(item) for item in value] if isinstance(value, list) else value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The text in pieces, and of each whether it is a control token that data spells."""
        parts: list[tuple[str, bool]] = []
        for at, piece in enumerate(_STAND_IN.split(text)):
            number = _read_stand_in(piece) if at % 2 else None
            word = piece if number is None else self._quoted[number]
            parts.append((word, number is not None and number < len(self.all)))
        return [(word, is_spelled) for word, is_spelled in parts if word]

    def find_at_end(self, text: str) -> str | None:
        """The control token that the text ends with."""
        if not text.endswith(self.all):
            return None
        return next(token for token in self.all if text.endswith(token))

    def find_stop(self, text: str, start: int, end: int) -> int:
        """Where a turn ends: after the stop token, which stands last in `text[start:end]` or is what comes next.

        Some templates write none of their own and the model stops with the token that opens the next turn.
        """
        turn = text[start:end].rstrip()
        if self.find_at_end(turn):
            return start + len(turn)
        following = self._next_stop.match(text, end)
        return following.end() if following else end

    def encode_as_text(self, token: str, line: int) -> list[int]:
        """The ids of a control token's spelling.

        Raises:
            DataError: the tokenizer knows no other way to write it than the token itself.
        """
        if token not in self._as_text:
            # Encoded after a line break, since some tokenizers put a space in front of whatever comes first.
            before, both = self._encode("\n"), self._encode("\n" + token)
            self._as_text[token] = both[len(before) :] if both[: len(before)] == before else self._encode(token)
        ids = self._as_text[token]
        if self._tokenizer.convert_tokens_to_ids(token) in ids:
            what = f'holds "{token}", a control token of the model, which cannot write it as text'
            raise DataError(f"line {line}: {what}; spell it otherwise, with a space inside", code="control_token")
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def _find(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Special tokens, and added ones that the template writes around plain turns: not every model marks those.

    Not among them are "<think>" and the like, which data may rightly hold.
    """
    written = ""
    if tokenizer.chat_template:
        try:
            written = tokenizer.apply_chat_template(_PROBE, tokenize=False)
        except (
            Exception
        ):  # A template may refuse this chat with whatever it likes; its special tokens are known anyway.
            written = ""
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    structural = {token.content for token in added if token.content in written and re.search(r"[^\w\s]", token.content)}
    return {token for token in special | structural if token.strip()}


def _make_stand_in(number: int) -> str:
    return "".join(_DIGITS[number >> shift & 15] for shift in (12, 8, 4, 0))


def _read_stand_in(text: str) -> int:
    return int("".join(f"{ord(digit) - 0xFDD0:x}" for digit in text), 16)
