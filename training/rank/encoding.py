"""Drafts to token ids and labels, many rows in one call of the tokenizer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from training.rank.control_tokens import ControlTokens
from training.rank.rendering import Draft

NO_LOSS = -100
"""PyTorch's own mark for a label that carries no loss."""

BATCH_CHARACTERS = 2**20
"""Encoded in one call: enough to keep the tokenizer's threads busy, little enough for any memory."""


@dataclass(frozen=True)
class Encoded:
    """`holds_spelled`: whether the data spells control tokens, which stand here as plain text."""

    line: int
    input_ids: list[int]
    labels: list[int]
    holds_spelled: bool


@dataclass(frozen=True)
class _Part:
    """A text with what stands before it, its anchor: tokenizers write the start of a text otherwise than its middle."""

    anchor: str
    text: str
    is_trained: bool
    is_spelled: bool


class Encoder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, controls: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        self._anchors: dict[str, list[int]] = {"": []}
        # One object for each id: a list of numbers is then 8 bytes a token, not 36.
        self._shared: dict[int, int] = {NO_LOSS: NO_LOSS}

    def encode(self, drafts: Iterable[Draft]) -> Iterator[Encoded]:
        """Raises DataError for a control token that the tokenizer cannot write as text."""
        batch: list[Draft] = []
        characters = 0
        for draft in drafts:
            batch.append(draft)
            characters += sum(len(piece.text) for piece in draft.pieces)
            if characters >= BATCH_CHARACTERS:
                yield from self._encode_batch(batch)
                batch, characters = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, drafts: list[Draft]) -> Iterator[Encoded]:
        parts = [self._split(draft) for draft in drafts]
        plain = iter(self._encode_plain([part for of_draft in parts for part in of_draft if not part.is_spelled]))
        for draft, of_draft in zip(drafts, parts, strict=True):
            ids, labels = [*draft.lead], [NO_LOSS] * len(draft.lead)
            for part in of_draft:
                new = self._controls.encode_as_text(part.text, draft.line) if part.is_spelled else next(plain)
                ids += new
                labels += new if part.is_trained else [NO_LOSS] * len(new)
            holds_spelled = any(part.is_spelled for part in of_draft)
            yield Encoded(
                draft.line, self._share([*ids, *draft.tail]), self._share([*labels, *draft.tail]), holds_spelled
            )

    def _split(self, draft: Draft) -> list[_Part]:
        parts: list[_Part] = []
        anchor = ""
        for piece in draft.pieces:
            for text, is_spelled in self._controls.split(piece.text):
                parts.append(_Part(anchor, text, piece.is_trained, is_spelled))
                anchor = (None if is_spelled else self._controls.find_at_end(text)) or "\n"
        return parts

    def _encode_plain(self, parts: list[_Part]) -> list[list[int]]:
        if not parts:
            return []
        encoded = self._call([part.anchor + part.text for part in parts])
        return [self._without_anchor(part, ids) for part, ids in zip(parts, encoded, strict=True)]

    def _without_anchor(self, part: _Part, ids: list[int]) -> list[int]:
        if part.anchor not in self._anchors:
            self._anchors[part.anchor] = self._call([part.anchor])[0]
        anchor = self._anchors[part.anchor]
        # Where the two have merged into one token, the text is encoded alone: it is its beginning that is white space.
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self._call([part.text])[0]

    def _call(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _share(self, ids: list[int]) -> list[int]:
        return [self._shared.setdefault(token, token) for token in ids]
