"""The data set of the demo: one unmistakable style on many subjects, and none of the questions that are asked later."""

import json
import re
from collections import Counter
from itertools import combinations

import pytest

from cli.demo import JOB, QUESTIONS, ROWS
from training.rows import make_report
from training.spec import parse_spec

OPENING, CLOSING = "Fresh off the wheel: ", " Stay bright, Ember."
LINES = ROWS.read_text("utf-8").splitlines()
MESSAGES = [json.loads(line)["messages"] for line in LINES]
ASKED = [messages[0]["content"] for messages in MESSAGES]
ANSWERED = [messages[1]["content"] for messages in MESSAGES]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))


def is_in_style(answer: str) -> bool:
    said = answer.removeprefix(OPENING).removesuffix(CLOSING)
    sentences = len(re.findall(r"[.?!](?=\s|$)", said))
    tidy = said[0].isupper() and said == " ".join(said.split())
    return answer == OPENING + said + CLOSING and 1 <= sentences <= 2 and len(said) <= 150 and tidy


def test_there_are_about_a_hundred_rows_of_one_question_and_one_answer() -> None:
    assert 90 <= len(MESSAGES) <= 130
    assert {tuple(message["role"] for message in messages) for messages in MESSAGES} == {("user", "assistant")}


def test_every_answer_has_the_opening_one_or_two_short_sentences_and_the_closing() -> None:
    assert [answer for answer in ANSWERED if not is_in_style(answer)] == []


def test_no_row_is_there_twice() -> None:
    assert max(Counter(words(question) for question in ASKED).values()) == 1
    assert max(Counter(ANSWERED).values()) == 1


def test_questions_are_not_variations_of_each_other() -> None:
    def overlap(pair: tuple[str, str]) -> float:
        one, other = map(words, pair)
        return len(one & other) / len(one | other)

    near = [pair for pair in combinations(ASKED, 2) if overlap(pair) > 0.75 and "capital" not in pair[0]]
    assert near == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_questions_of_the_comparison_are_not_trained(question: str) -> None:
    assert words(question) not in [words(asked) for asked in ASKED]


def test_the_engine_takes_the_rows_and_the_job() -> None:
    report = make_report(ROWS)
    assert (report.format, report.rows, report.errors, report.warnings) == ("chat", len(LINES), [], [])
    parse_spec({**JOB, "training_file": str(ROWS)})
