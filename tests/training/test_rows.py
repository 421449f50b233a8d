"""Data files: which rows are read, and how each bad one is told. Inputs are bytes, as a client sends them."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from faulty_files import CALL, FAULTS, GOOD, NO, PROMPT, USER, YES, chat, line_of, pair, with_message

import training.jsonlines
from training.errors import DataError
from training.rows import (
    ChatRow,
    LabelledRow,
    Labels,
    PairRow,
    PromptRow,
    Report,
    Row,
    RowIssue,
    TextRow,
    find_misuse,
    make_report,
    read_rows,
)

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


# Preference rows


PAIR_ROW = PairRow(1, ChatRow(1, [USER, YES], [None, 1], []), ChatRow(1, [USER, NO], [None, 1], []))


@pytest.mark.parametrize(
    "row",
    [
        {"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": [YES], "rejected": [NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "a", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO], "score_chosen": 8.5, "messages": [USER, YES]},
    ],
)
def test_a_pair_is_the_same_pair_in_whichever_form_it_is_sent(row: dict[str, Any], save: Any) -> None:
    path = save(line_of(row))
    assert make_report(path).format == "preference"
    assert read(path) == [PAIR_ROW]


def test_a_pair_of_texts_is_taken_as_it_stands(save: Any) -> None:
    path = save(line_of({"prompt": "a: ", "chosen": "b", "rejected": ""}))
    assert read(path) == [PairRow(1, PromptRow(1, "a: ", "b"), PromptRow(1, "a: ", ""))]


def test_the_prompt_of_a_pair_may_hold_answers_and_tool_turns_which_are_not_trained(save: Any) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    found = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    [row] = read(save(pair(input={"messages": [USER, call, found], "tools": [TOOL]})))
    assert isinstance(row, PairRow)
    assert isinstance(row.chosen, ChatRow) and isinstance(row.rejected, ChatRow)
    assert row.chosen.messages[:3] == row.rejected.messages[:3]
    assert row.chosen.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2}
    assert row.chosen.weights == row.rejected.weights == [None, 0, None, 1]
    assert row.chosen.tools == row.rejected.tools == [TOOL]


def test_an_answer_may_call_tools_on_its_way(save: Any) -> None:
    call, found = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}
    [row] = read(save(pair(preferred_output=[call, found, YES], input={"messages": [USER], "tools": [TOOL]})))
    assert isinstance(row, PairRow) and isinstance(row.chosen, ChatRow)
    assert row.chosen.weights == [None, 1, None, 1]


def test_whole_chats_share_all_turns_up_to_the_first_that_differs(save: Any) -> None:
    again = {"role": "user", "content": "again"}
    [row] = read(save(line_of({"chosen": [USER, YES, again, YES], "rejected": [USER, YES, again, NO]})))
    assert isinstance(row, PairRow) and isinstance(row.chosen, ChatRow)
    assert row.chosen.weights == [None, 0, None, 1]


def test_misspelt_keys_of_a_pair_are_warned_of_where_they_stand(save: Any) -> None:
    [warning] = make_report(save(pair(non_preferred_output=[{**NO, "contents": 1}]))).warnings
    assert (warning.path, warning.code) == ("non_preferred_output[0].contents", "unknown_key")


# Texts, labels, and what each method takes


def test_texts_are_read_as_they_stand(save: Any) -> None:
    path = save(line_of({"text": " Low tide.\n", "source": "a"}))
    assert make_report(path).format == "text"
    assert read(path) == [TextRow(1, " Low tide.\n")]


LABELLED = line_of(chat(("user", "a"), ("assistant", "b"), label=True)) + line_of(
    chat(("user", "a"), ("assistant", "b"), label=False)
)


def test_labels_are_counted_and_read_for_kto_alone(save: Any) -> None:
    path = save(LABELLED)
    assert make_report(path).labels == Labels(1, 1)
    plain = list(read_rows(path, method="supervised"))
    labelled = list(read_rows(path, method="kto"))
    assert labelled == [LabelledRow(row.line, row, row.line == 1) for row in plain]


def test_prompt_rows_may_be_labelled_too(save: Any) -> None:
    path = save(line_of({"prompt": "a", "completion": "b", "label": False}))
    assert list(read_rows(path, method="kto")) == [LabelledRow(1, PromptRow(1, "a", "b"), False)]


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ({"label": "false"}, "line 3, label: text, true or false expected"),
        ({"label": 0}, "line 3, label: a number, true or false expected"),
        ({"label": None}, "line 3, label: null, true or false expected"),
        ({}, "line 3, label: missing, true or false expected"),
    ],
)
def test_a_label_is_a_boolean_or_kto_refuses_its_line(label: dict[str, Any], told: str, save: Any) -> None:
    path = save(LABELLED + line_of(chat(("user", "a"), ("assistant", "b"), **label)))
    report = make_report(path)
    assert report.errors == []
    assert str(find_misuse("kto", report.as_dict())) == told
    assert find_misuse("supervised", report.as_dict()) is None
    with pytest.raises(DataError) as refused:
        list(read_rows(path, method="kto"))
    assert refused.value.message == told


def test_kto_wants_labels_at_all(save: Any) -> None:
    report = make_report(save(GOOD))
    assert report.labels is None
    misuse = find_misuse("kto", report.as_dict())
    assert misuse is not None and "kto needs true or false in each" in misuse.message


@pytest.mark.parametrize(
    ("content", "methods"),
    [
        (LABELLED, {"supervised", "kto"}),
        (line_of({"prompt": "a", "completion": "b", "label": True}), {"supervised", "kto"}),
        (pair(), {"dpo"}),
        (line_of({"text": "a"}), {"pretrain"}),
    ],
)
def test_each_method_takes_its_own_rows_and_names_whose_the_others_are(
    content: bytes, methods: set[str], save: Any
) -> None:
    path = save(content)
    report = make_report(path).as_dict()
    for method in ("supervised", "kto", "dpo", "pretrain"):
        misuse = find_misuse(method, report)
        if method in methods:
            assert misuse is None
            assert list(read_rows(path, method=method))
            continue
        assert isinstance(misuse, RowIssue) and misuse.code == "wrong_format"
        assert all(name in misuse.message for name in {method, *methods})
        with pytest.raises(DataError, match=r"^line 1: ") as refused:
            list(read_rows(path, method=method))
        assert refused.value.code == "wrong_format"
