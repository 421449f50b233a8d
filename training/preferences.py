"""One preference row: two answers to one prompt, in each of the ways in which such rows are written."""

from dataclasses import dataclass
from typing import Any

from training.jsonlines import Malformed, kind_of
from training.messages import get_text, make_tools, make_turns

ANSWER_KEYS = {"preferred_output", "non_preferred_output"}

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TextPair:
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class MessagePair:
    """`chosen` and `rejected` begin and end with the assistant. `places` holds each list of messages as it stands in
    the row, by its path."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: Messages
    places: dict[str, Messages]


def make_pair(value: dict[str, Any]) -> TextPair | MessagePair:
    """Prompt and answers of a row: `input`, `preferred_output` and `non_preferred_output` as in the OpenAI API, or
    `prompt`, `chosen` and `rejected` as texts or messages; chosen and rejected may also be two whole chats.

    Raises:
        Malformed: the first thing that is wrong, with its path.
    """
    if value.keys() & ANSWER_KEYS or ("input" in value and not value.keys() & {"chosen", "rejected"}):
        return _make_of_openai(value)
    for key in ("chosen", "rejected"):
        if key not in value:
            raise Malformed("missing_field", "missing, text or a list of messages expected", key)
    prompt, chosen, rejected = value.get("prompt"), value["chosen"], value["rejected"]
    if isinstance(chosen, list) != isinstance(rejected, list):
        message = f"{kind_of(rejected)}, but chosen is {kind_of(chosen)}; write both in one way"
        raise Malformed("wrong_type", message, "rejected")
    if isinstance(chosen, list) or isinstance(prompt, list):
        return _make_of_messages(prompt, chosen, rejected, value.get("tools"))
    if prompt is None:
        raise Malformed("missing_field", "missing; where the answers are texts, the prompt is one too", "prompt")
    pair = TextPair(get_text(prompt, "prompt"), get_text(chosen, "chosen"), get_text(rejected, "rejected"))
    if not pair.chosen.strip():
        raise Malformed("nothing_to_learn", "the answer is empty: nothing to learn", "chosen")
    _refuse_same(pair.chosen, pair.rejected)
    return pair


def _make_of_openai(value: dict[str, Any]) -> MessagePair:
    for key in ("input", "preferred_output", "non_preferred_output"):
        if key not in value:
            wanted = "an object with messages" if key == "input" else "a list of messages"
            raise Malformed("missing_field", f"missing, {wanted} expected", key)
    given = value["input"]
    if not isinstance(given, dict):
        raise Malformed("wrong_type", f"{kind_of(given)}, an object with messages expected", "input")
    if "messages" not in given:
        raise Malformed("missing_field", "missing, a list of messages expected", "input.messages")
    lists = {
        "input.messages": given["messages"],
        "preferred_output": value["preferred_output"],
        "non_preferred_output": value["non_preferred_output"],
    }
    places = {place: _make_turns(messages, place) for place, messages in lists.items()}
    for place in ("preferred_output", "non_preferred_output"):
        _check_answer(places[place], place, 0)
    prompt, chosen, rejected = places.values()
    tools = make_tools(given.get("tools"), "input.tools")
    return _checked(MessagePair(prompt, chosen, rejected, tools, places), "preferred_output")


def _make_of_messages(prompt: object, chosen: object, rejected: object, tools: object) -> MessagePair:
    places = {
        key: _make_turns([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer, key)
        for key, answer in {"chosen": chosen, "rejected": rejected}.items()
    }
    one, other = places["chosen"], places["rejected"]
    if isinstance(prompt, list):
        places["prompt"] = _make_turns(prompt, "prompt")
    elif prompt is not None and one[0]["role"] == other[0]["role"] == "assistant":
        places["prompt"] = [{"role": "user", "content": get_text(prompt, "prompt")}]
    before = places.get("prompt", [])
    if one[: len(before)] == other[: len(before)] == before:
        # Either no prompt apart, or one that both sides repeat.
        before = _shared_beginning(one, other)
        if prompt is not None and not isinstance(prompt, list):
            _check_repeated(get_text(prompt, "prompt"), before)
        if not before:
            message = "chosen and rejected begin with different messages and there is no prompt; both answer one prompt"
            raise Malformed("no_prompt", message, "rejected[0]")
        one, other = one[len(before) :], other[len(before) :]
    for place, answer in {"chosen": one, "rejected": other}.items():
        _check_answer(answer, place, len(places[place]) - len(answer))
    return _checked(MessagePair(before, one, other, make_tools(tools), places), "chosen")


def _make_turns(value: object, place: str) -> Messages:
    messages = make_turns(value, place)
    for message in messages:
        message.pop("weight", None)
    return messages


def _shared_beginning(one: Messages, other: Messages) -> Messages:
    """The messages that both have first; each keeps at least one of its own."""
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    return one[:shared]


def _check_repeated(prompt: str, before: Messages) -> None:
    if prompt not in [message.get("content") for message in before]:
        raise Malformed("other_prompt", "stands in none of the messages that chosen and rejected share", "prompt")


def _check_answer(answer: Messages, place: str, start: int) -> None:
    for index, what in ((0, "begins"), (len(answer) - 1, "ends")):
        role = answer[index]["role"]
        if role != "assistant":
            message = f"the answer {what} with a message from {role}; it has to be the assistant's"
            raise Malformed("last_turn", message, f"{place}[{start + index}].role")


def _checked(pair: MessagePair, place: str) -> MessagePair:
    _refuse_same(pair.chosen, pair.rejected)
    if not any(message.get("content", "").strip() or "tool_calls" in message for message in pair.chosen):
        raise Malformed("nothing_to_learn", "the answer is empty: nothing to learn", place)
    return pair


def _refuse_same(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise Malformed("nothing_to_learn", "the two answers are the same: nothing to prefer; leave the row out")
