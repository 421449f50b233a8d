"""Messages, checked as the OpenAI fine-tuning API describes them, and made ready for a chat template."""

import difflib
from collections.abc import Callable
from typing import Any

from training.jsonlines import Malformed, kind_of, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_NAME_CHARACTERS = 64
KNOWN_KEYS = ("role", "content", "name", "weight", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
"""Of a message. Others go to the template too, with a warning: they may be misspelt."""

_OLD_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


def make_messages(value: object) -> list[dict[str, Any]]:
    """Messages with content as one text and call arguments as objects; nulls are left out, weights kept.

    Raises:
        Malformed: the first thing that is wrong, with its path.
    """
    messages = make_turns(value, "messages")
    last = messages[-1]["role"]
    if last != "assistant":
        path = f"messages[{len(messages) - 1}].role"
        raise Malformed("last_turn", f"the last message is from {last}; it has to be the assistant's answer", path)
    _refuse_nothing_to_learn([message for message in messages if message["role"] == "assistant"])
    return messages


def make_turns(value: object, path: str) -> list[dict[str, Any]]:
    """Messages as above, in any order of roles.

    Raises:
        Malformed: as above.
    """
    if not isinstance(value, list) or not value:
        raise Malformed("wrong_type", f"{_named(value)}, a list of messages expected", path)
    return [_make_message(message, f"{path}[{index}]") for index, message in enumerate(value)]


def make_tools(value: object, path: str = "tools") -> list[dict[str, Any]]:
    """The tools of a row, as the template takes them: `{"type": "function", "function": {"name": ...}}`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed("wrong_type", f"{kind_of(value)}, a list of tools expected", path)
    for index, tool in enumerate(value):
        _check_function(tool, f"{path}[{index}]")
    return value


def get_text(value: object, path: str) -> str:
    """A field that has to be text."""
    if not isinstance(value, str):
        raise Malformed("wrong_type", f"{kind_of(value)}, text expected", path)
    return value


def _make_message(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("wrong_type", f"{kind_of(value)}, an object with role and content expected", path)
    message = {key: item for key, item in value.items() if item is not None}
    role = _get_role(message, f"{path}.role")
    if "function_call" in message:
        raise Malformed("field_not_offered", "the old form of a tool call; write tool_calls", f"{path}.function_call")
    if "name" in message:
        _check_name(message["name"], f"{path}.name")
    _check_weight(message, role, f"{path}.weight")
    if "tool_calls" in message:
        message["tool_calls"] = _make_calls(message["tool_calls"], role, f"{path}.tool_calls")
    if "content" in message:
        message["content"] = _join_parts(message["content"], f"{path}.content")
    elif "tool_calls" not in message:
        found = "null" if "content" in value else "missing"
        raise Malformed("missing_field", f"{found}, text expected", f"{path}.content")
    return message


def _get_role(message: dict[str, Any], path: str) -> str:
    if "role" not in message:
        raise Malformed("missing_field", f"missing; one of {', '.join(ROLES)} expected", path)
    role = get_text(message["role"], path)
    if role in ROLES:
        return role
    lower = role.strip().lower()
    near = [_OLD_ROLES[lower]] if lower in _OLD_ROLES else difflib.get_close_matches(lower, ROLES, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    case = " Roles are written in lower case." if lower in ROLES else ""
    raise Malformed("unknown_role", f'"{role[:40]}" is none of {", ".join(ROLES)}{hint}{case}', path)


def _check_name(value: object, path: str) -> None:
    name = get_text(value, path)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise Malformed("invalid_name", f"{len(name)} characters, 1 to {MAX_NAME_CHARACTERS} are allowed", path)


def _check_weight(message: dict[str, Any], role: str, path: str) -> None:
    if "weight" not in message:
        return
    weight = message["weight"]
    if role != "assistant":
        raise Malformed(
            "invalid_weight", f"only messages of the assistant have a weight, this one is from {role}", path
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        found = weight if kind_of(weight) == "a number" else kind_of(weight)
        raise Malformed("invalid_weight", f"{found}; 0 (not trained) or 1 (trained) expected", path)


def _join_parts(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Malformed("wrong_type", f"{kind_of(value)}, text expected", path)
    return "".join(_get_part(part, f"{path}[{index}]") for index, part in enumerate(value))


def _get_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise Malformed(
            "wrong_type", f'{kind_of(part)}, a part such as {{"type": "text", "text": "..."}} expected', path
        )
    if part.get("type") != "text":
        found = f'"{part["type"]}"' if isinstance(part.get("type"), str) else kind_of(part.get("type"))
        raise Malformed("part_not_offered", f"{found} parts are not offered yet; text parts only", f"{path}.type")
    return get_text(part.get("text"), f"{path}.text")


def _make_calls(value: object, role: str, path: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise Malformed("wrong_type", f"only the assistant calls tools, this message is from {role}", path)
    if not isinstance(value, list) or not value:
        raise Malformed("wrong_type", f"{_named(value)}, a list of calls expected", path)
    return [_make_call(call, f"{path}[{index}]") for index, call in enumerate(value)]


def _make_call(value: object, path: str) -> dict[str, Any]:
    call = _check_function(value, path)
    function = call["function"]
    arguments, path = function.get("arguments"), f"{path}.function.arguments"
    if isinstance(arguments, str):
        # The wire form. As an object the template writes it once; as text it would be escaped a second time.
        arguments = _located(parse_json, arguments, path)
        if not isinstance(arguments, dict):
            raise Malformed("invalid_arguments", f"decodes to {kind_of(arguments)}, an object expected", path)
    if not isinstance(arguments, dict):
        found = kind_of(arguments) if "arguments" in function else "missing"
        raise Malformed("invalid_arguments", f"{found}, an object or its JSON text expected", path)
    return {**call, "function": {**function, "arguments": arguments}}


def _check_function(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("wrong_type", f"{kind_of(value)}, an object expected", path)
    if value.get("type", "function") != "function":
        raise Malformed("field_not_offered", 'only "function" is offered', f"{path}.type")
    function = value.get("function")
    if not isinstance(function, dict):
        found = kind_of(function) if "function" in value else "missing"
        raise Malformed("wrong_type", f"{found}, an object with a name expected", f"{path}.function")
    if "name" not in function:
        raise Malformed("missing_field", "missing, text expected", f"{path}.function.name")
    _check_name(function["name"], f"{path}.function.name")
    return value


def _located(parse: Callable[[str], Any], text: str, path: str) -> Any:
    try:
        return parse(text)
    except Malformed as bad:
        raise Malformed("invalid_arguments", f"its text is no JSON object: {bad.message}", path) from None


def _refuse_nothing_to_learn(answers: list[dict[str, Any]]) -> None:
    trained = [answer for answer in answers if answer.get("weight") != 0]
    if not trained:
        raise Malformed("nothing_to_learn", "all assistant messages have weight 0: nothing to learn", "messages")
    if not any(answer.get("content", "").strip() or "tool_calls" in answer for answer in trained):
        raise Malformed("nothing_to_learn", "the assistant's answers are empty: nothing to learn", "messages")


def _named(value: object) -> str:
    return "an empty list" if value == [] else kind_of(value)
