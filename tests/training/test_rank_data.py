"""Token ids and labels of rows, against ids written down by hand: what carries loss, and what becomes of each row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import (
    ALTERNATING,
    BOS,
    CLOSE_INST,
    DEFAULT_SYSTEM,
    END,
    FORGETFUL,
    MARKED,
    NEEDS_USER,
    NO_STOP,
    NO_SYSTEM,
    PLAIN,
    START,
    TOOLS,
    TRIMMED,
    WITH_BOS,
    WRITTEN_OUT,
    ids_of,
    labelled,
    make_spaced_tokenizer,
    make_tokenizer,
    trained_texts,
)

from training.errors import DataError, ModelError
from training.facts import Counts
from training.rank.data import Example, Prepared, prepare
from training.rows import make_report

DOCS = Path(__file__).parents[2] / "docs" / "data-formats.md"

Prepare = Callable[..., Prepared]


@pytest.fixture
def run(tmp_path: Path) -> Prepare:
    """Prepare rows: a list of messages as (role, content) or whole messages, or a whole row."""

    def prepare_rows(tokenizer: Any, *rows: Any, **options: Any) -> Prepared:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(make_row(row)) + "\n" for row in rows))
        assert make_report(path).errors == []
        return prepare(
            path, tokenizer, **{"max_seq_len": 10_000, "truncation": "truncate", "train_on": "assistant", **options}
        )

    return prepare_rows


def make_row(row: Any) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    return {"messages": [{"role": m[0], "content": m[1]} if isinstance(m, tuple) else m for m in row]}


def parts(example: Example) -> tuple[list[int], list[int]]:
    return example.input_ids, example.labels


ONE = [("user", "Hi"), ("assistant", "Yo.")]
TWO = [("user", "Hi"), ("assistant", "Yo."), ("user", "So"), ("assistant", "No.")]


def test_each_answer_carries_loss_up_to_its_stop_token(run: Prepare) -> None:
    prepared = run(make_tokenizer(), TWO)
    assert parts(prepared.examples[0]) == labelled(
        ("<|start|>user\nHi<|end|>\n<|start|>assistant\n", False),
        ("Yo.<|end|>", True),
        ("\n<|start|>user\nSo<|end|>\n<|start|>assistant\n", False),
        ("No.<|end|>", True),
        ("\n", False),
    )
    assert prepared.counts == Counts(rows=1, trained_rows=1)
    assert prepared.warnings == []


TEMPLATES = {
    "plain": (PLAIN, "Yo.<|end|>"),
    "default system turn": (DEFAULT_SYSTEM, "Yo.<|end|>"),
    "begin-of-text token": (WITH_BOS, "Yo.<|end|>"),
    "trimming": (TRIMMED, "Yo.<|end|>"),
    "alternating": (ALTERNATING, " Yo.<|end|>"),
    "no system turn": (NO_SYSTEM, "Yo.<|end|>"),
    "needs a user turn": (NEEDS_USER, "Yo.<|end|>"),
    "generation marks": (MARKED, "Yo.<|end|>"),
    "forgetful": (FORGETFUL, "Yo.<|end|>"),
    "no stop token": (NO_STOP, "Yo.<|start|>"),
    "tools": (TOOLS, "Yo.<|end|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_has_the_ids_that_the_model_sees_at_inference(name: str, run: Prepare) -> None:
    template, first = TEMPLATES[name]
    tokenizer = make_tokenizer(template)
    example = run(tokenizer, TWO).examples[0]
    messages = make_row(TWO)["messages"]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert example.input_ids == (whole if template != NO_STOP else [*whole, END])
    assert trained_texts(tokenizer, example) == [first, first.replace("Yo", "No").replace("start", "end")]
    for asked, answer in ((1, "Yo."), (3, "No.")):
        prompt = tokenizer.apply_chat_template(messages[:asked], add_generation_prompt=True, return_dict=False)
        assert example.input_ids[: len(prompt)] == prompt
        assert tokenizer.decode(example.labels[len(prompt) : len(prompt) + 4]).strip().startswith(answer)


def test_a_default_system_turn_carries_no_loss(run: Prepare) -> None:
    [example] = run(make_tokenizer(DEFAULT_SYSTEM), ONE).examples
    assert parts(example) == labelled(
        ("<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n", False),
        ("Yo.<|end|>", True),
        ("\n", False),
    )


def test_what_opens_every_turn_may_be_the_begin_of_text_token(run: Prepare) -> None:
    tokenizer = make_tokenizer(DEFAULT_SYSTEM, bos="<|start|>", pad="<|end|>")
    [example] = run(tokenizer, ONE).examples
    assert example.input_ids.count(START) == 3
    assert trained_texts(tokenizer, example) == ["Yo.<|end|>"]


def test_the_stop_token_carries_loss_also_where_it_is_the_pad_token(run: Prepare) -> None:
    tokenizer = make_tokenizer(pad="<|end|>")
    assert trained_texts(tokenizer, run(tokenizer, TWO).examples[0]) == ["Yo.<|end|>", "No.<|end|>"]


def test_one_begin_of_text_token_where_template_and_tokenizer_both_write_it(run: Prepare) -> None:
    [example] = run(make_tokenizer(WITH_BOS, adds_bos=True), ONE).examples
    assert example.input_ids[:2] == [BOS, START]
    assert example.input_ids.count(BOS) == 1


def test_a_template_without_a_stop_token_stops_at_the_next_turn_and_at_the_end_of_text(run: Prepare) -> None:
    [example] = run(make_tokenizer(NO_STOP), TWO).examples
    assert parts(example) == labelled(
        ("<|start|>user\nHi<|start|>assistant\n", False),
        ("Yo.<|start|>", True),
        ("user\nSo<|start|>assistant\n", False),
        ("No.<|end|>", True),
    )


def test_a_generation_mark_that_leaves_out_the_stop_token_is_completed(run: Prepare) -> None:
    assert run(make_tokenizer(MARKED), TWO).examples == run(make_tokenizer(PLAIN), TWO).examples


def test_generation_marks_win_over_what_the_template_writes_to_ask(run: Prepare) -> None:
    template = MARKED.replace("{% generation %}", "> {% generation %}")
    tokenizer = make_tokenizer(template)
    assert trained_texts(tokenizer, run(tokenizer, TWO).examples[0]) == ["Yo.<|end|>", "No.<|end|>"]
    unmarked = make_tokenizer(template.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    assert trained_texts(unmarked, run(unmarked, TWO).examples[0]) == ["> Yo.<|end|>", "> No.<|end|>"]


def test_generation_marks_that_do_not_fit_the_answers_are_not_trusted(run: Prepare) -> None:
    on_first_only = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and not loop.last")
    on_users = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'user'")
    for template in (on_first_only, on_users):
        assert run(make_tokenizer(template), TWO).examples == run(make_tokenizer(PLAIN), TWO).examples


def test_thoughts_that_a_template_drops_from_earlier_turns_are_not_trained(run: Prepare) -> None:
    row = [("user", "Hi"), ("assistant", "hm</think>Yo."), ("user", "So"), ("assistant", "ah</think>No.")]
    [example] = run(make_tokenizer(FORGETFUL), row).examples
    assert parts(example) == labelled(
        ("<|start|>user\nHi<|end|>\n<|start|>assistant\n", False),
        ("Yo.<|end|>", True),
        ("\n<|start|>user\nSo<|end|>\n<|start|>assistant\n", False),
        ("ah</think>No.<|end|>", True),
        ("\n", False),
    )


@pytest.mark.parametrize("template", [PLAIN, DEFAULT_SYSTEM, NEEDS_USER, MARKED, TRIMMED])
def test_a_chat_may_begin_with_an_answer(template: str, run: Prepare) -> None:
    tokenizer = make_tokenizer(template)
    row = [("system", "Greet."), ("assistant", "a"), ("user", "Hi"), ("assistant", "s")]
    assert trained_texts(tokenizer, run(tokenizer, row).examples[0]) == ["a<|end|>", "s<|end|>"]
    assert trained_texts(tokenizer, run(tokenizer, row[1:]).examples[0]) == ["a<|end|>", "s<|end|>"]


def test_an_answer_that_a_template_trims_is_trained_as_trimmed(run: Prepare) -> None:
    [example] = run(make_tokenizer(TRIMMED), [("user", " Hi "), ("assistant", " \nYo. ")]).examples
    assert parts(example) == labelled(
        ("<|bos|><|start|>user\n\nHi<|end|><|start|>assistant\n\n", False), ("Yo.<|end|>", True)
    )


def test_answers_in_a_row_are_each_trained(run: Prepare) -> None:
    tokenizer = make_tokenizer()
    row = [("user", "Hi"), ("assistant", "Yo."), ("assistant", "Yo.")]
    assert trained_texts(tokenizer, run(tokenizer, row).examples[0]) == ["Yo.<|end|>", "Yo.<|end|>"]


def answer(content: str, weight: int | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "weight": weight}


@pytest.mark.parametrize(
    ("train_on", "weights", "trained"),
    [
        ("assistant", (None, None, None), ["a", "b", "c"]),
        ("assistant", (0, 1, None), ["b", "c"]),
        ("assistant", (None, None, 0), ["a", "b"]),
        ("last", (None, None, None), ["c"]),
        ("last", (1, None, None), ["a", "c"]),
        ("last", (1, None, 0), ["a"]),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_which_answers_are_trained(
    template: str, train_on: str, weights: tuple[int | None, ...], trained: list[str], run: Prepare
) -> None:
    tokenizer = make_tokenizer(template)
    row = [message for at, weight in enumerate(weights) for message in (("user", "?"), answer("abc"[at], weight))]
    [example] = run(tokenizer, row, train_on=train_on).examples
    assert trained_texts(tokenizer, example) == [f"{content}<|end|>" for content in trained]


def test_all_trains_every_token_but_answers_of_weight_0(run: Prepare) -> None:
    [example] = run(
        make_tokenizer(), [("user", "?"), answer("a", 0), ("user", "!"), answer("b", None)], train_on="all"
    ).examples
    assert parts(example) == labelled(
        ("<|start|>user\n?<|end|>\n<|start|>assistant\n", True),
        ("a<|end|>", False),
        ("\n<|start|>user\n!<|end|>\n<|start|>assistant\nb<|end|>\n", True),
    )  # fmt: skip


def test_text_that_spells_control_tokens_stays_text(run: Prepare) -> None:
    tokenizer = make_tokenizer()
    row = [("user", "a<|end|>\n<|start|>assistant\nb"), ("assistant", "see <|end|> and [INST]")]
    prepared = run(tokenizer, row)
    [example] = prepared.examples
    user, trained = b"a<|end|>\n<|start|>assistant\nb", [*b"see <|end|> and [INST]", END]
    opening = [START, *b"user\n", *user, END, *b"\n", START, *b"assistant\n"]
    assert example.input_ids == [*opening, *trained, *b"\n"]
    assert example.labels == [*[-100] * len(opening), *trained, -100]
    assert [(warning.line, warning.code) for warning in prepared.warnings] == [(1, "control_token_as_text")]
    sanitized = tokenizer.apply_chat_template(
        make_row(row)["messages"], sanitize_control_tokens=True, return_dict=False
    )
    assert example.input_ids == sanitized


def test_spelled_control_tokens_stay_text_in_prompts_tools_and_arguments(run: Prepare) -> None:
    function = {"name": "f<|end|>", "arguments": {"<|start|>": "[INST]"}}
    tools = [{"type": "function", "function": {"name": "f<|end|>", "description": "<|pad|>"}}]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    row = {"messages": [{"role": "user", "content": "?"}, call], "tools": tools}
    [example] = run(make_tokenizer(TOOLS), row).examples
    assert [token for token in example.input_ids if token > 255] == [START, END, START, END, START, END]
    [example] = run(make_tokenizer(), {"prompt": "<|bos|>", "completion": "<|end|>."}).examples
    assert parts(example) == ([*b"<|bos|><|end|>.", END], [*[-100] * 7, *b"<|end|>.", END])


def test_no_data_can_forge_what_stands_for_a_spelled_control_token(run: Prepare) -> None:
    text = "\ufdd0\ufdd0\ufdd0\ufdd3"
    [example] = run(make_tokenizer(), {"prompt": "a", "completion": text + "<|end|>"}).examples
    assert example.input_ids == [*b"a", *text.encode(), *b"<|end|>", END]


def test_a_control_token_that_is_not_marked_as_one_is_refused_where_it_would_open_a_turn(run: Prepare) -> None:
    tokenizer = make_tokenizer(PLAIN.replace("<|start|>", "<|turn|>"), unmarked=("<|turn|>", "<think>"))
    with pytest.raises(DataError, match=r'^line 2: holds "<\|turn\|>", a control token') as caught:
        run(tokenizer, ONE, [("user", "<|turn|>assistant"), ("assistant", "No.")])
    assert caught.value.code == "control_token"
    thinking = run(tokenizer, [("user", "Hi"), ("assistant", "<think>")]).examples[0]
    assert tokenizer.convert_tokens_to_ids("<think>") in thinking.labels


def test_an_answer_never_grows_into_what_is_written_before_it(run: Prepare) -> None:
    """A tokenizer that knows two line breaks as one token would otherwise change the prompt's own last token."""
    tokenizer = make_tokenizer(merges=(("Ċ", "Ċ"),))
    [example] = run(tokenizer, [("user", "Hi"), ("assistant", "\nYo.")]).examples
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert example.input_ids == [*prompt, *b"\nYo.", END, *b"\n"]
    [example] = run(tokenizer, {"prompt": "Q\n", "completion": "\nA"}).examples
    assert parts(example) == ([*b"Q\n\nA", END], [-100, -100, *b"\nA", END])


@pytest.mark.parametrize("template", [ALTERNATING, WRITTEN_OUT])
@pytest.mark.parametrize("scheme", ["always", "first"])
def test_no_space_is_put_in_front_of_an_answer_that_goes_on(scheme: str, template: str, run: Prepare) -> None:
    tokenizer = make_spaced_tokenizer(scheme, template)
    row = make_row([("user", "a"), ("assistant", "b"), ("user", "a"), ("assistant", "c")])
    [example] = run(tokenizer, row).examples
    assert example.input_ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
    trained = [label for label in example.labels if label != -100]
    assert tokenizer.convert_ids_to_tokens(trained) == ["▁b", "<|end|>", "▁c", "<|end|>"]
    [example] = run(tokenizer, {"prompt": "a", "completion": "b c"}).examples
    assert tokenizer.convert_ids_to_tokens(example.input_ids) == ["▁", "a", "b", "▁c", "<|end|>"]


@pytest.mark.parametrize("arguments", ['{"x": 2, "y": "5"}', {"x": 2, "y": "5"}])
def test_tools_and_calls_are_written_once_and_trained(arguments: Any, run: Prepare) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "k", "type": "function", "function": {"name": "add", "arguments": arguments}}
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "k", "content": "7"},
            {"role": "assistant", "content": "7."},
        ],
        "tools": [tool],
    }
    [example] = run(make_tokenizer(TOOLS), row).examples
    assert parts(example) == labelled(
        (f"<|start|>tools\n{json.dumps([tool])}<|end|>\n<|start|>user\n?<|end|>\n<|start|>assistant\n", False),
        ('<call>{"name": "add", "arguments": {"x": 2, "y": "5"}}</call><|end|>', True),
        ("\n<|start|>tool\n7<|end|>\n<|start|>assistant\n", False),
        ("7.<|end|>", True),
        ("\n", False),
    )


def test_a_template_that_would_drop_tools_is_refused(run: Prepare) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    row = [("user", "?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(DataError, match=r"^line 1, messages\[1\]\.tool_calls: .*template does not write"):
        run(make_tokenizer(), row)
    with pytest.raises(DataError, match=r"^line 1, tools: the model's chat template does not write"):
        run(make_tokenizer(), {**make_row(ONE), "tools": [{"type": "function", "function": {"name": "add"}}]})


def test_a_developer_turn_is_a_system_turn_to_templates_that_do_not_know_it(run: Prepare) -> None:
    rows = [[(role, "Be kind."), *ONE] for role in ("developer", "system")]
    assert len({tuple(example.input_ids) for example in run(make_tokenizer(), *rows).examples}) == 1
    knowing = run(make_tokenizer(PLAIN + "{# developer #}"), rows[0]).examples[0]
    assert bytes(knowing.input_ids[1:11]) == b"developer\n"


def test_a_row_that_the_template_refuses_is_told_with_its_words(run: Prepare) -> None:
    with pytest.raises(DataError, match=r"^line 2: .*roles must alternate user, assistant.*choose a model") as caught:
        run(make_tokenizer(ALTERNATING), ONE, [("user", "a"), ("user", "b"), ("assistant", "c")])
    assert caught.value.code == "template_error"
    with pytest.raises(DataError, match=r"^line 1: .*System role not supported"):
        run(make_tokenizer(NO_SYSTEM), [("system", "Be kind."), *ONE])


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}",
        "{{ messages[0]['content'] + none }}",
        "{{ 1 // 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_broken_or_hostile_template_is_an_error_of_the_row(template: str, run: Prepare) -> None:
    with pytest.raises(DataError, match=r"^line 1: the model's chat template refuses this row"):
        run(make_tokenizer(template), ONE)


def test_chat_rows_need_a_template_and_prompt_rows_do_not(run: Prepare) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*chat_template.jinja") as caught:
        run(make_tokenizer(None), ONE)
    assert (caught.value.code, caught.value.param) == ("no_chat_template", "model")
    assert run(make_tokenizer(None), {"prompt": "a", "completion": "b"}).counts.trained_rows == 1


@pytest.mark.parametrize(("adds_bos", "lead"), [(False, []), (True, [BOS])])
def test_prompt_rows_are_trained_as_they_stand_up_to_the_end_of_text(
    adds_bos: bool, lead: list[int], run: Prepare
) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    [example] = run(tokenizer, {"prompt": "Q: ", "completion": " A\n"}).examples
    assert parts(example) == ([*lead, *b"Q:  A\n", END], [*[-100] * len(lead), *[-100] * 3, *b" A\n", END])
    assert example.input_ids[: len(lead) + 3] == tokenizer("Q: ")["input_ids"]
    [example] = run(tokenizer, {"prompt": "Q: ", "completion": " A\n"}, train_on="all").examples
    assert example.labels == [*[-100] * len(lead), *b"Q:  A\n", END]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_an_empty_prompt_starts_from_the_begin_of_text_token(adds_bos: bool, run: Prepare) -> None:
    [example] = run(make_tokenizer(adds_bos=adds_bos), {"prompt": "", "completion": " Low tide."}).examples
    assert parts(example) == ([BOS, *b" Low tide.", END], [-100, *b" Low tide.", END])
    [example] = run(make_tokenizer(bos=None), {"prompt": "", "completion": "Low"}).examples
    assert example.input_ids == [END, *b"Low", END]


SHORT, LONG = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 20}
NO_ANSWER = {"prompt": "a" * 20, "completion": "b"}


def test_longer_rows_are_cut_at_the_end_and_counted(run: Prepare) -> None:
    prepared = run(make_tokenizer(), SHORT, LONG, NO_ANSWER, LONG, max_seq_len=8)
    assert [example.line for example in prepared.examples] == [1, 2, 4]
    assert parts(prepared.examples[1]) == ([*b"a", *b"b" * 7], [-100, *b"b" * 7])
    assert prepared.counts == Counts(rows=4, trained_rows=3, truncated=2, dropped=1, masked=1)
    assert [(warning.line, warning.code) for warning in prepared.warnings] == [
        (2, "rows_truncated"),
        (3, "rows_masked"),
    ]
    assert prepared.warnings[0].message == "longer than 8 tokens, cut at the end: 2 rows (lines 2, 4)"


def test_longer_rows_are_dropped_and_counted(run: Prepare) -> None:
    prepared = run(make_tokenizer(), *[LONG] * 7, SHORT, max_seq_len=8, truncation="drop")
    assert prepared.counts == Counts(rows=8, trained_rows=1, dropped=7)
    assert prepared.warnings[0].message == "longer than 8 tokens, dropped: 7 rows (lines 1, 2, 3, 4, 5 and 2 more)"


def test_a_row_of_exactly_the_limit_is_whole(run: Prepare) -> None:
    for truncation in ("error", "drop", "truncate"):
        prepared = run(make_tokenizer(), SHORT, max_seq_len=3, truncation=truncation)
        assert prepared.counts == Counts(rows=1, trained_rows=1)


def test_a_longer_row_is_an_error_where_that_was_asked(run: Prepare) -> None:
    with pytest.raises(DataError, match=r"^line 2: 22 tokens, more than max_seq_len 21, .*raise max_seq_len") as caught:
        run(make_tokenizer(), SHORT, LONG, max_seq_len=21, truncation="error")
    assert caught.value.code == "too_many_tokens"


@pytest.mark.parametrize(("truncation", "why"), [("truncate", "without a trained token"), ("drop", "longer")])
def test_nothing_left_to_train_is_an_error_that_says_why(truncation: str, why: str, run: Prepare) -> None:
    with pytest.raises(DataError, match=f"max_seq_len 8 tokens: 2 rows .lines 1, 2. {why}") as caught:
        run(make_tokenizer(), NO_ANSWER, NO_ANSWER, max_seq_len=8, truncation=truncation)
    assert caught.value.code == "nothing_to_train"


def test_a_loss_on_the_first_token_alone_is_none(run: Prepare) -> None:
    with pytest.raises(DataError, match="no row is left"):
        run(make_tokenizer(), [("user", "Hi"), answer("a", 1)], train_on="all", max_seq_len=1)


def test_rows_are_the_same_however_they_are_batched(run: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[("user", f"{at}?"), ("assistant", f"{at} é👩 <|end|>")] for at in range(40)]
    together = run(make_tokenizer(), *rows)
    monkeypatch.setattr("training.rank.encoding.BATCH_CHARACTERS", 1)
    assert run(make_tokenizer(), *rows) == together
    assert [example.line for example in together.examples] == list(range(1, 41))


def test_bad_rows_are_told_with_their_line(run: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": 3}\n')
    with pytest.raises(DataError, match=r"^line 2, completion: a number, text expected"):
        prepare(path, make_tokenizer(), max_seq_len=8, truncation="truncate", train_on="assistant")


def test_every_code_is_in_the_docs() -> None:
    codes = (
        "no_chat_template", "template_error", "control_token", "too_many_tokens", "nothing_to_train",
        "rows_truncated", "rows_dropped", "rows_masked", "control_token_as_text", "unknown_key", "label_ignored",
    )  # fmt: skip
    documented = DOCS.read_text()
    assert [code for code in codes if f"`{code}`" not in documented] == []


def test_the_hand_written_ids_are_those_of_the_tokenizer() -> None:
    text = "<|bos|><|start|>é [INST] 👩[/INST]\n<|end|>"
    assert make_tokenizer()(text)["input_ids"] == ids_of(text)
    assert CLOSE_INST in ids_of(text)
