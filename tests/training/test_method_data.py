"""Token ids and labels of pairs, labelled rows and plain texts, against ids written down by hand."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import BOS, END, PLAIN, START, TOOLS, ids_of, labelled, make_tokenizer

from training.errors import DataError
from training.facts import Counts
from training.rank.data import Labelled, Pair, Prepared, prepare_labelled, prepare_pairs, prepare_texts
from training.rank.sieve import Example

Save = Callable[..., Path]

USER = {"role": "user", "content": "Hi"}
YES, NO = {"role": "assistant", "content": "Yo."}, {"role": "assistant", "content": "Go away."}
PROMPT = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(*rows: dict[str, Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def parts(example: Example) -> tuple[list[int], list[int]]:
    return example.input_ids, example.labels


def pairs_of(path: Path, tokenizer: Any = None, *, max_seq_len: int = 10_000, truncation: str = "truncate") -> Prepared:
    return prepare_pairs(path, tokenizer or make_tokenizer(), max_seq_len=max_seq_len, truncation=truncation)


# Pairs


def test_both_sides_have_the_prompt_and_each_its_answer_up_to_the_stop_token(save: Save) -> None:
    (pair,) = pairs_of(save({"prompt": [USER], "chosen": [YES], "rejected": [NO]})).examples
    assert isinstance(pair, Pair)
    assert parts(pair.chosen) == labelled((PROMPT, False), ("Yo.<|end|>", True), ("\n", False))
    assert parts(pair.rejected) == labelled((PROMPT, False), ("Go away.<|end|>", True), ("\n", False))


def test_a_pair_gives_the_same_tokens_in_whichever_form_it_is_sent(save: Save) -> None:
    system = {"role": "system", "content": "Reply in capitals."}
    prompt = [system, USER]
    forms = (
        {"input": {"messages": prompt}, "preferred_output": [YES], "non_preferred_output": [NO]},
        {"prompt": prompt, "chosen": [YES], "rejected": [NO]},
        {"chosen": [*prompt, YES], "rejected": [*prompt, NO]},
    )
    first, *others = [(pair.chosen, pair.rejected) for form in forms for pair in pairs_of(save(form)).examples]
    assert others == [first, first]
    prompt_ids = ids_of("<|start|>system\nReply in capitals.<|end|>\n" + PROMPT)
    assert all(side.input_ids[: len(prompt_ids)] == prompt_ids for side in first)


def test_texts_are_continued_as_they_stand_and_closed_by_the_end_of_text(save: Save) -> None:
    (pair,) = pairs_of(save({"prompt": "a: ", "chosen": "b", "rejected": ""})).examples
    assert parts(pair.chosen) == ([*b"a: b", END], [-100, -100, -100, *b"b", END])
    assert parts(pair.rejected) == ([*b"a: ", END], [-100, -100, -100, END])


def test_tool_turns_and_answers_of_the_prompt_are_written_and_not_trained(save: Save) -> None:
    call = {"id": "z", "type": "function", "function": {"name": "stock", "arguments": '{"item": 7}'}}
    prompt = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "12"}]
    tool = {"type": "function", "function": {"name": "stock", "parameters": {}}}
    row = {"input": {"messages": prompt, "tools": [tool]}, "preferred_output": [YES], "non_preferred_output": [NO]}
    tokenizer = make_tokenizer(TOOLS)
    (pair,) = pairs_of(save(row), tokenizer).examples
    for side, answer in ((pair.chosen, "Yo."), (pair.rejected, "Go away.")):
        text = tokenizer.decode([token for token, label in zip(*parts(side), strict=True) if label == -100])
        assert '"name": "stock"' in text and "<|start|>tool\n12<|end|>" in text
        assert [label for label in side.labels if label != -100] == ids_of(answer + "<|end|>")


def test_a_template_that_writes_the_prompt_of_the_two_sides_differently_is_refused(save: Save) -> None:
    counting = "{{ messages | length }}" + PLAIN
    row = {"prompt": [USER], "chosen": [YES], "rejected": [NO, {"role": "tool", "content": "12"}, NO]}
    with pytest.raises(DataError, match=r"^line 1: .* writes the prompt of the two answers differently"):
        pairs_of(save(row), make_tokenizer(counting))


LONG = {"prompt": "Go", "chosen": "ok", "rejected": "b" * 40}
SHORT = {"prompt": "Go", "chosen": "ok", "rejected": "no"}
FULL = {"prompt": "a" * 20, "chosen": "ok", "rejected": "no"}


def test_each_side_is_cut_on_its_own_and_a_pair_with_nothing_to_train_is_dropped(save: Save) -> None:
    prepared = pairs_of(save(LONG, SHORT, FULL), max_seq_len=10)
    assert [pair.line for pair in prepared.examples] == [1, 2]
    (pair, _) = prepared.examples
    assert isinstance(pair, Pair)
    assert parts(pair.chosen) == ([*b"Gook", END], [-100, -100, *b"ok", END])
    assert parts(pair.rejected) == ([*b"Go", *b"b" * 8], [-100, -100, *b"b" * 8])
    assert prepared.counts == Counts(rows=3, trained_rows=2, truncated=1, dropped=1, masked=1)
    assert [(warning.line, warning.code) for warning in prepared.warnings] == [
        (1, "rows_truncated"),
        (3, "rows_masked"),
    ]


def test_a_pair_is_dropped_or_an_error_for_either_side(save: Save) -> None:
    path = save(LONG, SHORT)
    assert pairs_of(path, max_seq_len=10, truncation="drop").counts == Counts(rows=2, trained_rows=1, dropped=1)
    with pytest.raises(DataError, match=r"^line 1: 43 tokens"):
        pairs_of(path, max_seq_len=10, truncation="error")


def test_many_pairs_keep_their_sides_together(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.rank.encoding.BATCH_CHARACTERS", 7)
    rows = [{"prompt": str(number), "chosen": "c" * number, "rejected": "r"} for number in range(1, 30)]
    for number, pair in enumerate(pairs_of(save(*rows)).examples, 1):
        assert isinstance(pair, Pair)
        assert pair.chosen.input_ids == [*f"{number}{'c' * number}".encode(), END]
        assert pair.rejected.input_ids == [*f"{number}r".encode(), END]


# Labelled rows


def labelled_of(path: Path, max_seq_len: int = 10_000) -> Prepared:
    return prepare_labelled(path, make_tokenizer(), max_seq_len=max_seq_len, truncation="truncate")


def test_only_the_last_answer_of_a_labelled_chat_is_trained(save: Save) -> None:
    again = {"role": "user", "content": "So"}
    row = {"messages": [USER, YES, again, NO], "label": False}
    first, _ = labelled_of(save(row, {**row, "label": True})).examples
    assert isinstance(first, Labelled)
    assert not first.is_desirable
    prompt = PROMPT + "Yo.<|end|>\n<|start|>user\nSo<|end|>\n<|start|>assistant\n"
    assert parts(first.row) == labelled((prompt, False), ("Go away.<|end|>", True), ("\n", False))


def test_labels_stay_with_their_rows_and_are_counted_of_the_trained_ones(save: Save) -> None:
    rows = [
        {"prompt": "a" * (20 if number == 3 else 1), "completion": "b", "label": number % 3 == 0} for number in range(7)
    ]
    prepared = labelled_of(save(*rows), max_seq_len=10)
    labels = {row.line: row.is_desirable for row in prepared.examples if isinstance(row, Labelled)}
    assert labels == {1: True, 2: False, 3: False, 5: False, 6: False, 7: True}
    assert prepared.counts == Counts(rows=7, trained_rows=6, dropped=1, masked=1, desirable=2, undesirable=4)
    following = [row.following.line for row in prepared.examples if isinstance(row, Labelled)]
    assert following == [2, 3, 5, 6, 7, 1]


def test_one_labelled_row_is_too_few(save: Save) -> None:
    with pytest.raises(DataError, match="at least two rows") as refused:
        labelled_of(save({"prompt": "a", "completion": "b", "label": True}))
    assert refused.value.code == "too_few_rows"


# Plain texts


def texts_of(path: Path, tokenizer: Any, max_seq_len: int = 10_000, truncation: str = "truncate") -> Prepared:
    return prepare_texts(path, tokenizer, max_seq_len=max_seq_len, truncation=truncation)


def test_a_text_stands_between_begin_and_end_and_all_of_it_is_trained(save: Save) -> None:
    path = save({"text": "Low tide"})
    for tokenizer in (make_tokenizer(), make_tokenizer(adds_bos=True)):
        (example,) = texts_of(path, tokenizer).examples
        assert isinstance(example, Example)
        assert parts(example) == ([BOS, *b"Low tide", END], [-100, *b"Low tide", END])


def test_a_control_token_in_a_text_is_text(save: Save) -> None:
    (example,) = texts_of(save({"text": "a<|start|>"}), make_tokenizer()).examples
    assert isinstance(example, Example)
    assert START not in example.input_ids
    assert example.input_ids == [BOS, *b"a<|start|>", END]


@pytest.mark.parametrize("limit", [8, 9, 10, 11, 12, 13, 25, 26, 27, 100])
def test_a_long_text_is_cut_into_pieces_and_each_token_is_trained_once_after_the_one_before_it(
    save: Save, limit: int
) -> None:
    text = "abcdefghijklmnopqrstuvwxy"
    prepared = texts_of(save({"text": text}, {"text": "z"}), make_tokenizer(), limit)
    whole = [BOS, *text.encode(), END]
    trained = []
    for piece in prepared.examples:
        assert isinstance(piece, Example)
        assert 2 <= len(piece.input_ids) <= limit
        predicted = zip(piece.input_ids, piece.input_ids[1:], piece.labels[1:], strict=False)
        trained += [(before, token) for before, token, label in predicted if label == token]
    assert trained == [*pairwise(whole), (BOS, ord("z")), (ord("z"), END)]
    assert prepared.counts == Counts(rows=2, trained_rows=2)
    assert [warning.code for warning in prepared.warnings] == (["rows_split"] if limit < 27 else [])


def test_long_texts_are_dropped_or_an_error_where_that_was_asked(save: Save) -> None:
    path = save({"text": "a" * 30}, {"text": "b"})
    assert texts_of(path, make_tokenizer(), 10, "drop").counts == Counts(rows=2, trained_rows=1, dropped=1)
    with pytest.raises(DataError, match="32 tokens"):
        texts_of(path, make_tokenizer(), 10, "error")
