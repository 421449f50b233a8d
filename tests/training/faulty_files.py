"""Data files that are wrong in one way each, with what has to be told of them; and makers of rows."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from typing import Any


def chat(*messages: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def line_of(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


GOOD = line_of(chat(("user", "Ping"), ("assistant", "Pong")))
PROMPT = line_of({"prompt": "Ping", "completion": " Pong"})
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}


def with_message(**message: Any) -> bytes:
    """A row whose second message has these fields beside its role."""
    user, answer = {"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}
    return line_of({"messages": [user, {"role": "assistant", **message}, answer]})


def with_call(**function: Any) -> bytes:
    return with_message(tool_calls=[{"type": "function", "function": {"name": "add", **function}}])


def make_tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        entry = tarfile.TarInfo("train.jsonl")
        entry.size = len(GOOD)
        archive.addfile(entry, io.BytesIO(GOOD))
    return made.getvalue()


def make_zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("train.jsonl", GOOD)
    return made.getvalue()


class Fault:
    """A file with something wrong, and what has to be told of its first bad place."""

    def __init__(self, content: bytes, code: str, *words: str, line: int = 1, path: str = "") -> None:
        self.content = content
        self.place = (code, line, path)
        self.words = words


FILES = {
    "gzip": Fault(gzip.compress(GOOD), "compressed_file", "gzip, unpack it first"),
    "zip": Fault(make_zip(), "compressed_file", "zip archive, unpack it first"),
    "tar": Fault(make_tar(), "compressed_file", "tar archive, unpack it first"),
    "bzip2": Fault(bz2.compress(GOOD), "compressed_file", "bzip2, unpack it first"),
    "xz": Fault(lzma.compress(GOOD), "compressed_file", "xz, unpack it first"),
    "picture": Fault(b"\x89PNG\r\n\x1a\n" + bytes(range(1, 32)) * 9, "binary_file", "binary", "JSON lines"),
    "parquet": Fault(b"PAR1\x15\x04\x15\x10PAR1", "format_not_offered", "Parquet", "not offered yet"),
    "utf-16": Fault(GOOD.decode().encode("utf-16"), "not_utf8", "UTF-16", "save it as UTF-8"),
    "utf-16 without mark": Fault(GOOD.decode().encode("utf-16-le"), "not_utf8", "UTF-16"),
    "latin-1": Fault(
        GOOD + b'{"prompt": "caf\xe9", "completion": "x"}\n', "not_utf8", "0xE9", "byte 16", "UTF-8", line=2
    ),
    "empty": Fault(b"", "empty_file", "empty", "one line"),
    "blank": Fault(b"\n \r\n\t\n", "empty_file", "blank lines"),
    "mark only": Fault(b"\xef\xbb\xbf\n", "empty_file", "blank lines"),
    "lfs": Fault(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git_lfs_pointer", "git lfs pull"),
    "page": Fault(b"<!DOCTYPE html>\n<html></html>", "not_json", "web page", "download it again"),
    "array": Fault(b"\n[" + GOOD.strip() + b"]", "json_array", "JSON array", "each example on one line", line=2),
    "array of ShareGPT": Fault(line_of([{"conversations": []}]), "json_array", "one line", "ShareGPT", "not offered"),
    "pretty": Fault(json.dumps(json.loads(GOOD), indent=1).encode(), "unfinished_json", "column 2", "on one line"),
    "csv": Fault(b"prompt,completion\na,b\n", "format_not_offered", "CSV", "prompt, completion", "not offered yet"),
    "tsv": Fault(b'"prompt"\t"completion"\na\tb\n', "format_not_offered", "TSV", "prompt, completion"),
    "prose": Fault(b"It was a dark night.\n", "not_json", "It was a dark night.", "each example on one line"),
}
SYNTAX = {
    "nul": Fault(GOOD + b"\x00\x00\x00" + GOOD, "nul_byte", "NUL byte (0x00) at byte 1", line=2),
    "two on a line": Fault(
        GOOD + GOOD.strip() + GOOD, "several_values", "more than one", f"column {len(GOOD)}", line=2
    ),
    "comma after": Fault(GOOD.strip() + b",\n", "invalid_json", "a comma after the object", f"column {len(GOOD)}"),
    "bracket after": Fault(GOOD.strip() + b"]\n", "invalid_json", '"]" after the object'),
    "missing comma": Fault(b'{"prompt": "a" "completion": "b"}', "invalid_json", "comma is missing at column 16"),
    "bare quote": Fault(b'{"prompt": "a "b" c", "completion": "d"}', "invalid_json", "column 16", "quote"),
    "trailing comma": Fault(b'{"prompt": "a", "completion": "b",}', "invalid_json", "trailing comma", "column 3"),
    "trailing comma in list": Fault(b'{"messages": [1, ]}', "invalid_json", "trailing comma", "column 18"),
    "missing colon": Fault(b'{"prompt" "a"}', "invalid_json", "colon is missing at column 11"),
    "missing value": Fault(b'{"prompt": , "completion": "b"}', "invalid_json", "value is missing at column 12"),
    "single quotes": Fault(b"{'prompt': 'a'}", "invalid_json", "single quote at column 2", "double quotes"),
    "python words": Fault(b'{"prompt": None}', "invalid_json", "None at column 12", "null"),
    "bad escape": Fault(b'{"prompt": "C:\\dir"}', "invalid_json", "backslash at column 15"),
    "raw tab": Fault(b'{"prompt": "a\tb"}', "invalid_json", "U+0009", "column 14"),
    "mark inside": Fault(GOOD + b"\xef\xbb\xbf" + GOOD, "invalid_json", "byte-order mark", line=2),
    "cut off": Fault(GOOD + GOOD[:30] + b"\n" + GOOD, "unfinished_json", "the line ends", "one line", line=2),
    "NaN": Fault(b'{"prompt": "a", "completion": "b", "score": NaN}', "non_finite_number", "NaN"),
    "Infinity": Fault(b'{"prompt": "a", "completion": "b", "score": -Infinity}', "non_finite_number", "-Infinity"),
    "1e999": Fault(b'{"prompt": "a", "completion": "b", "score": 1e999}', "non_finite_number", "1e999"),
    "digits": Fault(b'{"prompt": ' + b"9" * 5000 + b"}", "invalid_json", "too many digits"),
    "deep": Fault(b'{"a": ' + b"[" * 100000 + b"]" * 100000 + b"}", "too_deep", "64 deep"),
    "rather deep": Fault(b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "too_deep", "64 deep"),
    "deep and open": Fault(b'{"a":' * 100000, "too_deep", "64 deep"),
    "double key": Fault(b'{"messages": [{"role": "user", "role": "x"}]}', "duplicate_key", '"role" stands twice'),
    "double key, half": Fault(b'{"\\ud83d": 1, "\\ud83d": 2}', "duplicate_key", '"\\ud83d" stands twice'),
    "half emoji": Fault(
        b'{"messages": [{"role": "user", "content": "\\ud83d!"}]}',
        "lone_surrogate",
        "\\ud83d is one half",
        path="messages[0].content",
    ),
}
ROWS = {
    "number row": Fault(GOOD + b"42\n", "not_an_object", "a number, an object expected", line=2),
    "text row": Fault(GOOD + b'"hello"\n', "not_an_object", "text, an object expected", line=2),
    "null row": Fault(GOOD + b"null\n", "not_an_object", "null, an object expected", line=2),
    "list row": Fault(GOOD + b"[1]\n", "not_an_object", "a list, an object expected", line=2),
    "unknown columns": Fault(
        line_of({"question": "a", "reply": "b"}), "unknown_shape", '"question", "reply"', '"messages"'
    ),
    "no columns": Fault(b"{}\n", "unknown_shape", "found none"),
    "ShareGPT": Fault(line_of({"conversations": [{"from": "human"}]}), "shape_not_offered", "ShareGPT", '"messages"'),
    "rejected response": Fault(
        line_of(chat(("user", "a"), ("assistant", "b"), rejected_response="c")),
        "shape_not_offered",
        "rejected_response",
    ),
    "instruction": Fault(line_of({"instruction": "a", "output": "b"}), "shape_not_offered", "instruction"),
    "number as text": Fault(line_of({"text": 3}), "wrong_type", "a number, text expected", path="text"),
    "empty text": Fault(line_of({"text": " \n"}), "nothing_to_learn", "the text is empty", path="text"),
    "mixed": Fault(GOOD + b"\n" + PROMPT, "mixed_shapes", "a prompt row", "a chat row", "line 1", line=3),
    "number as completion": Fault(
        PROMPT + line_of({"prompt": "a", "completion": 3}),
        "wrong_type",
        "a number, text expected",
        line=2,
        path="completion",
    ),
    "null prompt": Fault(
        line_of({"prompt": None, "completion": "a"}), "wrong_type", "null, text expected", path="prompt"
    ),
    "list as prompt": Fault(line_of({"prompt": [], "completion": "a"}), "wrong_type", '"messages"', path="prompt"),
    "no completion": Fault(
        PROMPT + line_of({"prompt": "a"}), "missing_field", "missing, text expected", line=2, path="completion"
    ),
    "empty completion": Fault(
        line_of({"prompt": "a", "completion": " "}), "nothing_to_learn", "empty", path="completion"
    ),
}
MESSAGES = {
    "no messages": Fault(line_of({"messages": []}), "wrong_type", "an empty list", path="messages"),
    "text as messages": Fault(
        line_of({"messages": "hi"}), "wrong_type", "text, a list of messages expected", path="messages"
    ),
    "text as message": Fault(line_of({"messages": ["hi"]}), "wrong_type", "text, an object", path="messages[0]"),
    "number as content": Fault(
        line_of(chat(("user", "a"), ("assistant", 5))),
        "wrong_type",
        "a number, text expected",
        path="messages[1].content",
    ),
    "null content": Fault(
        line_of(chat(("user", None))), "missing_field", "null, text expected", path="messages[0].content"
    ),
    "no content": Fault(with_message(), "missing_field", "missing, text expected", path="messages[1].content"),
    "no role": Fault(
        line_of({"messages": [{"content": "a"}]}), "missing_field", "one of system", path="messages[0].role"
    ),
    "capital role": Fault(
        line_of(chat(("User", "a"))), "unknown_role", '"User"', '"user"', "lower case", path="messages[0].role"
    ),
    "misspelt role": Fault(
        line_of(chat(("assitant", "a"))), "unknown_role", 'did you mean "assistant"', path="messages[0].role"
    ),
    "old role": Fault(line_of(chat(("function", "a"))), "unknown_role", 'did you mean "tool"', path="messages[0].role"),
    "image": Fault(
        line_of(chat(("user", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]))),
        "part_not_offered",
        '"image_url"',
        "text parts only",
        path="messages[0].content[1].type",
    ),
    "number as part": Fault(
        line_of(chat(("user", [1]))), "wrong_type", "a number, a part", path="messages[0].content[0]"
    ),
    "long name": Fault(
        with_message(content="a", name="n" * 65), "invalid_name", "65 characters", "64", path="messages[1].name"
    ),
    "weight 2": Fault(
        with_message(content="a", weight=2), "invalid_weight", "2; 0 (not trained) or 1", path="messages[1].weight"
    ),
    "weight true": Fault(
        with_message(content="a", weight=True), "invalid_weight", "a boolean", path="messages[1].weight"
    ),
    "weight of a user": Fault(
        line_of({"messages": [{"role": "user", "content": "a", "weight": 1}]}),
        "invalid_weight",
        "only messages of the assistant",
        path="messages[0].weight",
    ),
    "last from user": Fault(
        GOOD + line_of(chat(("user", "a"))),
        "last_turn",
        "the last message is from user",
        line=2,
        path="messages[0].role",
    ),
    "last from tool": Fault(
        line_of(chat(("user", "a"), ("tool", "b"))), "last_turn", "from tool", path="messages[1].role"
    ),
    "empty answers": Fault(
        line_of(chat(("user", "a"), ("assistant", " "))), "nothing_to_learn", "empty: nothing to learn", path="messages"
    ),
    "weights 0": Fault(
        line_of({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}),
        "nothing_to_learn",
        "weight 0: nothing to learn",
        path="messages",
    ),
}
TOOLS = {
    "old function call": Fault(
        with_message(function_call={}), "field_not_offered", "write tool_calls", path="messages[1].function_call"
    ),
    "no calls": Fault(with_message(tool_calls=[]), "wrong_type", "an empty list", path="messages[1].tool_calls"),
    "call of a user": Fault(
        line_of({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}),
        "wrong_type",
        "only the assistant",
        path="messages[0].tool_calls",
    ),
    "call without function": Fault(
        with_message(tool_calls=[{}]), "wrong_type", "missing", path="messages[1].tool_calls[0].function"
    ),
    "call without name": Fault(
        with_message(tool_calls=[{"function": {}}]),
        "missing_field",
        "missing",
        path="messages[1].tool_calls[0].function.name",
    ),
    "no arguments": Fault(
        with_call(), "invalid_arguments", "missing", path="messages[1].tool_calls[0].function.arguments"
    ),
    "arguments encoded twice": Fault(
        with_call(arguments='"{\\"x\\": 2}"'),
        "invalid_arguments",
        "decodes to text, an object expected",
        path="messages[1].tool_calls[0].function.arguments",
    ),
    "broken arguments": Fault(
        with_call(arguments='{"x": 2'),
        "invalid_arguments",
        "no JSON object",
        "column 8",
        path="messages[1].tool_calls[0].function.arguments",
    ),
    "list as arguments": Fault(
        with_call(arguments=[1]),
        "invalid_arguments",
        "a list, an object or its JSON text",
        path="messages[1].tool_calls[0].function.arguments",
    ),
    "other tool": Fault(
        line_of(chat(("user", "a"), ("assistant", "b"), tools=[{"type": "code_interpreter"}])),
        "field_not_offered",
        '"function"',
        path="tools[0].type",
    ),
    "text as tools": Fault(
        line_of(chat(("user", "a"), ("assistant", "b"), tools="[]")),
        "wrong_type",
        "text, a list of tools",
        path="tools",
    ),
}
USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
PAIR = {"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]}


def pair(**changes: Any) -> bytes:
    """A preference row as in the OpenAI API; a change to None leaves the field out."""
    return line_of({key: value for key, value in {**PAIR, **changes}.items() if value is not None})


def simple_pair(**fields: Any) -> bytes:
    return line_of({"chosen": "b", "rejected": "c", **fields})


PAIRS = {
    "no rejected answer": Fault(
        pair() + pair(non_preferred_output=None), "missing_field", "missing", line=2, path="non_preferred_output"
    ),
    "no preferred answer": Fault(pair(preferred_output=None), "missing_field", "missing", path="preferred_output"),
    "no input": Fault(pair(input=None), "missing_field", "an object with messages", path="input"),
    "no input messages": Fault(pair(input={"tools": []}), "missing_field", "missing", path="input.messages"),
    "list as input": Fault(pair(input=[USER]), "wrong_type", "a list, an object with messages", path="input"),
    "number in the prompt": Fault(
        pair(input={"messages": [USER, {"role": "user", "content": 3}]}),
        "wrong_type",
        "a number, text expected",
        path="input.messages[1].content",
    ),
    "bad tools of a pair": Fault(
        pair(input={"messages": [USER], "tools": [3]}), "wrong_type", "a number", path="input.tools[0]"
    ),
    "answer from the user": Fault(
        pair(preferred_output=[USER]), "last_turn", "begins with a message from user", path="preferred_output[0].role"
    ),
    "answer that ends with the user": Fault(
        pair(non_preferred_output=[NO, USER]), "last_turn", "ends with", path="non_preferred_output[1].role"
    ),
    "text as answer": Fault(
        pair(preferred_output="b"), "wrong_type", "text, a list of messages expected", path="preferred_output"
    ),
    "same answers": Fault(pair(non_preferred_output=[YES]), "nothing_to_learn", "the same", "leave the row out"),
    "empty preferred answer": Fault(
        pair(preferred_output=[{"role": "assistant", "content": " "}]),
        "nothing_to_learn",
        "the answer is empty",
        path="preferred_output",
    ),
    "only chosen": Fault(
        simple_pair(prompt="a") + line_of({"prompt": "a", "chosen": "b"}),
        "missing_field",
        "missing",
        line=2,
        path="rejected",
    ),
    "text and list": Fault(
        simple_pair(prompt="a", rejected=[NO]), "wrong_type", "a list, but chosen is text", path="rejected"
    ),
    "texts without a prompt": Fault(simple_pair(), "missing_field", "the prompt is one too", path="prompt"),
    "number as chosen": Fault(
        simple_pair(prompt="a", chosen=3), "wrong_type", "a number, text expected", path="chosen"
    ),
    "empty chosen": Fault(simple_pair(prompt="a", chosen=""), "nothing_to_learn", "empty", path="chosen"),
    "same texts": Fault(simple_pair(prompt="a", rejected="b"), "nothing_to_learn", "nothing to prefer"),
    "chats with no shared beginning": Fault(
        simple_pair(chosen=[USER, YES], rejected=[{"role": "user", "content": "z"}, NO]),
        "no_prompt",
        "both answer one prompt",
        path="rejected[0]",
    ),
    "chats that part at a user": Fault(
        simple_pair(chosen=[USER, YES, USER, NO], rejected=[USER, YES, {"role": "user", "content": "z"}, NO]),
        "last_turn",
        "begins with a message from user",
        path="chosen[2].role",
    ),
    "a prompt that is in neither chat": Fault(
        simple_pair(prompt="z", chosen=[USER, YES], rejected=[USER, NO]), "other_prompt", "share", path="prompt"
    ),
    "chat and pair": Fault(pair() + GOOD, "mixed_shapes", "a chat row", "a preference row", line=2),
}
FAULTS = {**FILES, **SYNTAX, **ROWS, **MESSAGES, **TOOLS, **PAIRS}
