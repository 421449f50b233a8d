"""Data files: which rows are read, and how each bad one is told. Inputs are bytes, as a client sends them."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from faulty_files import FAULTS, GOOD, PROMPT, chat, line_of, with_message

import training.jsonlines
from training.errors import DataError
from training.rows import ChatRow, PromptRow, Report, Row, make_report, read_rows

DOCS = Path(__file__).parents[2] / "docs" / "data-formats.md"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def write(content: bytes, name: str = "data.bin") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_line_its_place_and_what_to_do(name: str, save: Any) -> None:
    fault = FAULTS[name]
    report = make_report(save(fault.content))
    found = report.errors[0]
    assert (found.code, found.line, found.path) == fault.place
    assert [word for word in fault.words if word not in found.message] == []
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False).encode("utf-8"))["error_count"] >= 1


@pytest.mark.parametrize("name", FAULTS)
def test_reading_stops_at_the_fault_with_a_message_that_begins_with_its_place(name: str, save: Any) -> None:
    code, line, path = FAULTS[name].place
    with pytest.raises(DataError) as caught:
        list(read_rows(save(FAULTS[name].content)))
    assert caught.value.code == code
    assert caught.value.message.startswith(f"line {line}, {path}: " if path else f"line {line}: ")


def test_every_code_is_in_the_docs() -> None:
    documented = DOCS.read_text()
    assert {fault.place[0] for fault in FAULTS.values() if f"`{fault.place[0]}`" not in documented} == set()


def test_the_place_comes_first_then_what_is_wrong(save: Any) -> None:
    content = GOOD + line_of(chat(("user", "a"), ("assistant", 5)))
    with pytest.raises(DataError, match=r"^line 2, messages\[1\]\.content: a number, text expected$"):
        list(read_rows(save(content)))


def read(path: Path) -> list[Row]:
    assert make_report(path).errors == []
    return list(read_rows(path))


def answer_of(row: Row) -> str:
    assert isinstance(row, ChatRow)
    text = row.messages[-1]["content"]
    assert isinstance(text, str)
    return text


def test_a_chat_file_is_reported_with_its_format_and_its_rows(save: Any) -> None:
    assert make_report(save(GOOD + b"\n" + GOOD)) == Report("chat", 2, [], 0, [])


def test_the_content_decides_and_not_the_name_of_the_file(save: Any) -> None:
    assert make_report(save(PROMPT, "train.csv")).format == "prompt_completion"
    assert make_report(save(gzip.compress(PROMPT), "train.jsonl")).errors[0].code == "compressed_file"


def test_prompt_rows_keep_every_space(save: Any) -> None:
    path = save(line_of({"prompt": "", "completion": " Low tide.\n"}))
    assert read(path) == [PromptRow(1, "", " Low tide.\n")]


def test_lines_end_at_line_feeds_only(save: Any) -> None:
    text = "dawn\u2028noon\u2029dusk\u0085night\x0c"
    row = json.dumps(chat(("user", "a"), ("assistant", text)), ensure_ascii=False).replace("\x0c", "\\f")
    rows = read(save(row.encode() + b"\r\n" + GOOD.strip()))
    assert [row.line for row in rows] == [1, 2]
    assert answer_of(rows[0]) == text


def test_blank_lines_are_no_rows_but_count_as_lines(save: Any) -> None:
    assert [row.line for row in read(save(b"\n \r\n" + GOOD + b"\n\n" + GOOD))] == [3, 6]


def test_a_byte_order_mark_changes_nothing(save: Any) -> None:
    assert read(save(b"\xef\xbb\xbf" + GOOD)) == read(save(GOOD))


@pytest.mark.parametrize("text", ["👩‍👩‍👧 é ü 漢字", "a\0b", "\ufeffa", "\ufdd0", "x" * 3_000_000])
def test_any_text_is_read_as_it_stands(text: str, save: Any) -> None:
    for ensure_ascii in (True, False):
        row = json.dumps(chat(("user", "a"), ("assistant", text)), ensure_ascii=ensure_ascii)
        assert answer_of(read(save(row.encode()))[0]) == text


def test_parts_of_text_are_joined(save: Any) -> None:
    parts = [{"type": "text", "text": "Capital of "}, {"type": "text", "text": "Latvia?"}]
    [row] = read(save(line_of(chat(("user", parts), ("assistant", "Riga")))))
    assert isinstance(row, ChatRow)
    assert row.messages[0]["content"] == "Capital of Latvia?"


@pytest.mark.parametrize("arguments", ['{"x": 2}', {"x": 2}])
def test_arguments_become_an_object_in_whichever_form_they_are_sent(arguments: Any, save: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [row] = read(save(line_of({"messages": messages, "tools": [TOOL]})))
    assert isinstance(row, ChatRow)
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 2}}
    assert "content" not in row.messages[1]
    assert row.tools == [TOOL]


def test_weights_are_read_beside_the_messages(save: Any) -> None:
    messages = [{"role": "assistant", "content": "a", "weight": weight} for weight in (0, 1, None, 1.0)]
    [row] = read(save(line_of({"messages": messages})))
    assert isinstance(row, ChatRow)
    assert row.weights == [0, 1, None, 1]
    assert all("weight" not in message for message in row.messages)


def test_other_columns_of_any_type_never_decide(save: Any) -> None:
    extras: list[Any] = ["a", 3, [1, "b"], {"x": None}, None, False]
    content = b"".join(line_of(chat(("user", "a"), ("assistant", "b"), id=extra, prompt=extra)) for extra in extras)
    assert len(read(save(content))) == len(extras)


def test_every_bad_row_is_counted_and_the_first_hundred_are_listed(save: Any) -> None:
    report = make_report(save(GOOD + b"5\n" * 250))
    assert (report.rows, report.error_count, len(report.errors)) == (251, 250, 100)
    assert [found.line for found in report.errors[:3]] == [2, 3, 4]


def test_a_file_of_many_lines_that_is_no_rows_at_all_is_told_once(save: Any) -> None:
    pretty = json.dumps([json.loads(GOOD)] * 50, indent=1).encode()
    report = make_report(save(pretty))
    assert (report.rows, report.error_count) == (0, 1)


def test_a_misspelt_key_of_a_message_is_warned_of_once(save: Any) -> None:
    report = make_report(save(with_message(content="a", wieght=0) * 3))
    assert report.error_count == 0
    [warning] = report.warnings
    assert (warning.line, warning.path, warning.code) == (1, "messages[1].wieght", "unknown_key")


def test_boolean_labels_are_warned_of_since_they_are_not_followed(save: Any) -> None:
    report = make_report(save(line_of(chat(("user", "a"), ("assistant", "b"), label=False))))
    assert [(warning.code, warning.path) for warning in report.warnings] == [("label_ignored", "label")]


def test_an_overlong_line_is_told_and_reading_goes_on_behind_it(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.jsonlines, "MAX_LINE_BYTES", 1000)
    around_bytes = len(line_of({"prompt": "", "completion": ""}).strip())
    exact, longer = (line_of({"prompt": "", "completion": "x" * (size - around_bytes)}) for size in (1000, 1001))
    report = make_report(save(exact + longer * 2 + exact))
    assert [(found.line, found.code) for found in report.errors] == [(2, "line_too_long"), (3, "line_too_long")]
    assert report.rows == 4


def test_memory_does_not_grow_with_the_file(save: Any) -> None:
    small, large = save(GOOD * 4_000, "small"), save(GOOD * 16_000, "large")

    def peak_bytes(path: Path) -> int:
        tracemalloc.start()
        make_report(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(large) < peak_bytes(small) + 50_000


def test_reading_rows_loads_neither_torch_nor_transformers() -> None:
    check = "import sys, training.rows; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
