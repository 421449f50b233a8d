"""Rows as pieces of text that carry loss or not: chat rows as the model's own template writes them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from training.errors import DataError, ModelError
from training.jsonlines import printable
from training.rank.control_tokens import ControlTokens
from training.rows import ChatRow, PromptRow, TextRow

TrainOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Piece:
    """A text that is encoded on its own, so that what comes before it reads as it does at inference."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class Draft:
    """A row before its text is encoded: `lead` are ids in front of it without loss, `tail` ids behind it with loss.

    In the pieces, stand-ins (control_tokens.py) are in the place of control tokens that the data spells.
    """

    line: int
    pieces: tuple[Piece, ...]
    lead: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()


class Renderer:
    """Makes drafts of rows for one tokenizer and one choice of what is trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, controls: ControlTokens, train_on: str) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        self._train_on = train_on
        self._lead = _find_lead(tokenizer)

    def make_draft(self, row: ChatRow | PromptRow | TextRow) -> Draft:
        """Raises DataError for a row that the template refuses, ModelError where there is no template."""
        if isinstance(row, TextRow):
            return self._of_prompt(PromptRow(row.line, "", row.text))
        return self._of_chat(row) if isinstance(row, ChatRow) else self._of_prompt(row)

    def _of_prompt(self, row: PromptRow) -> Draft:
        """Prompt and completion as they stand, closed by the end-of-text token.

        They do not go through the chat template, also for models that have one: such a row says exactly which text is
        continued, and turns that its author cannot see would change it. Whoever wants turns sends chat rows.
        """
        stop = self._tokenizer.eos_token_id
        tail = () if stop is None else (stop,)
        completion = Piece(self._controls.quote(row.completion), True)
        if row.prompt:
            prompt = Piece(self._controls.quote(row.prompt), self._train_on == "all")
            return Draft(row.line, (prompt, completion), self._lead, tail)
        # The first token is only learnt where something stands before it.
        start = self._tokenizer.bos_token_id if self._tokenizer.bos_token_id is not None else stop
        return Draft(row.line, (completion,), self._lead or (() if start is None else (start,)), tail)

    def _of_chat(self, row: ChatRow) -> Draft:
        template = self._get_template(row)
        quoted = self._quote(row, template)
        text = self._render(quoted, quoted.messages)
        self._check(row, quoted, text)
        trained = [self._is_trained(row, index) for index in range(len(row.messages))]
        default = self._train_on == "all"
        apart = [
            index
            for index, message in enumerate(row.messages)
            if message["role"] == "assistant" and trained[index] != default
        ]
        spans = self._find_spans(quoted, text, template, apart)
        stop = self._tokenizer.eos_token_id
        is_open = trained[-1] and stop is not None and not self._controls.find_at_end(text.rstrip())
        return Draft(row.line, _cut(text, spans, default), tail=(stop,) if is_open else ())

    def _is_trained(self, row: ChatRow, index: int) -> bool:
        weight = row.weights[index]
        if weight is not None:
            return weight == 1
        return self._train_on != "last" or index == len(row.messages) - 1

    def _get_template(self, row: ChatRow) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=row.tools or None)
        except ValueError:
            raise ModelError(
                "the model has no chat template, which chat rows need; choose one tuned for chat, put a "
                'chat_template.jinja into its folder, or send rows with "prompt" and "completion"',
                param="model",
                code="no_chat_template",
            ) from None

    def _quote(self, row: ChatRow, template: str) -> ChatRow:
        messages: list[dict[str, Any]] = self._controls.quote(row.messages)
        for message, given in zip(messages, row.messages, strict=True):
            message["role"] = given["role"]
            # The newer name of the system role. Templates that do not know it would drop the turn or refuse it.
            if message["role"] == "developer" and "developer" not in template:
                message["role"] = "system"
        return replace(row, messages=messages, tools=self._controls.quote(row.tools))

    def _render(self, row: ChatRow, messages: Sequence[dict[str, Any]], *, is_prompt: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=row.tools or None, tokenize=False, add_generation_prompt=is_prompt
            )
        except Exception as bad:  # A template is a program of the model's author and fails in its own ways.
            reason = printable(str(bad) or type(bad).__name__)[:300]
            raise DataError(
                f"line {row.line}: the model's chat template refuses this row: {reason}; "
                "change the row, or choose a model whose template takes it",
                code="template_error",
            ) from None

    def _check(self, row: ChatRow, quoted: ChatRow, text: str) -> None:
        """Refuse what would be trained otherwise than it was meant, without a word."""
        if quoted.messages != row.messages and "\\ufdd" in text.lower():
            what = "holds a control token where the chat template writes escapes"
            raise DataError(f"line {row.line}: {what}; spell it otherwise", code="control_token")
        for place, functions in _list_functions(quoted):
            if any(function["name"] not in text for function in functions):
                what = "the model's chat template does not write these; choose a model whose template does"
                raise DataError(f"line {row.line}, {place}: {what}", code="template_error")

    def _find_spans(self, row: ChatRow, text: str, template: str, indices: list[int]) -> list[Span]:
        """Where the turns of these assistant messages stand in the text, from the first word to the stop token."""
        marked = self._find_marked(row, text, template) if indices and _GENERATION.search(template) else None
        spans = [marked[index] if marked else self._find_turn(row, text, index) for index in indices]
        return [(start, self._controls.find_stop(text, start, end)) for start, end in spans]

    def _find_marked(self, row: ChatRow, text: str, template: str) -> dict[int, Span] | None:
        """Spans by the template's own generation marks; None where they do not fit the messages one by one."""
        rendered, marks = render_jinja_template(
            [row.messages],
            tools=row.tools or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        answers = {index: message for index, message in enumerate(row.messages) if message["role"] == "assistant"}
        if rendered[0] != text or len(marks[0]) != len(answers):
            return None
        spans = dict(zip(answers, marks[0], strict=True))
        for index, (start, end) in spans.items():
            if answers[index].get("content", "").strip() not in text[start:end]:
                return None
        return spans

    def _find_turn(self, row: ChatRow, text: str, index: int) -> Span:
        """The turn lies between what the template writes to ask for it and what it writes up to it.

        A template may refuse a beginning of the chat or write it otherwise; then a word in the place of the answer
        shows where it stands.
        """
        is_last = index == len(row.messages) - 1
        start = self._measure(row, text, index, is_prompt=True)
        end = len(text) if is_last else self._measure(row, text, index + 1)
        if start is None or end is None or end < start:
            inner = self._find_by_stand_in(row, text, index)
            start = inner[0] if start is None else start
            end = inner[1] if end is None or end < start else end
        return start, end

    def _measure(self, row: ChatRow, text: str, count: int, *, is_prompt: bool = False) -> int | None:
        """The length of the first messages where they are rendered as in the whole chat."""
        try:
            beginning = self._render(row, row.messages[:count], is_prompt=is_prompt)
        except DataError:
            return None
        return len(beginning) if text.startswith(beginning) else None

    def _find_by_stand_in(self, row: ChatRow, text: str, index: int) -> Span:
        word = "stand-in"
        while word in text:
            word += "-in"
        messages = [*row.messages]
        messages[index] = {**messages[index], "content": word}
        before, found, after = self._render(row, messages).partition(word)
        end = len(text) - len(after)
        if not found or not text.startswith(before) or not text.endswith(after) or end < len(before):
            place = f"line {row.line}, messages[{index}]"
            what = "the model's chat template does not show where this answer stands"
            raise DataError(f"{place}: {what}; leave it out, or choose another model", code="template_error")
        return len(before), end


def _list_functions(row: ChatRow) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "tools", [tool["function"] for tool in row.tools]
    for index, message in enumerate(row.messages):
        yield f"messages[{index}].tool_calls", [call["function"] for call in message.get("tool_calls", ())]


def _cut(text: str, spans: list[Span], default: bool) -> tuple[Piece, ...]:
    pieces, at = [], 0
    for start, end in spans:
        pieces += [Piece(text[at : max(at, start)], default), Piece(text[max(at, start) : end], not default)]
        at = max(at, end)
    pieces.append(Piece(text[at:], default))
    return tuple(piece for piece in pieces if piece.text)


def _find_lead(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer itself puts in front of a text, such as the begin-of-text token."""
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return tuple(whole[:at])
