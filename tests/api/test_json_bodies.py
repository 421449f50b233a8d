"""JSON bodies are parsed strictly, within a limit, and every fault is told with its place."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from api import bodies
from api.bodies import MAX_BODY_BYTES, parse_body
from store.errors import InvalidRequestError

JOBS = "/v1/fine_tuning/jobs"


WRONG = [
    (b"{", "invalid_json", "line 1, column 2"),
    (b'{"a": 1,\n "b" 2}', "invalid_json", "line 2, column 6"),
    (b"model=tiny", "invalid_json", "line 1, column 1"),
    (b"{} {}", "invalid_json", "column 4"),
    (b'{"a": "\xff"}', "invalid_json", "byte 8"),
    (b'{"seed": NaN}', "non_finite_number", "NaN"),
    (b'{"seed": -Infinity}', "non_finite_number", "Infinity"),
    (b'{"seed": 1e999}', "non_finite_number", "1e999"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", "a number with too many digits; at most 4300 are read"),
    (b'{"seed": 1, "seed": 2}', "duplicate_key", "seed"),
    (b"[" * 100_000, "too_deep", "deep"),
    (b"[" * 500 + b"]" * 500, "too_deep", "deep"),
    (rb'{"model": "\ud800"}', "lone_surrogate", "ud800"),
    (rb'{"metadata": {"a": "x\u0000"}}', "invalid_value", "metadata.a: a NUL"),
    (rb'{"a\u0000": 1}', "invalid_value", "NUL"),
    (b"", "invalid_body", "the body is empty; send the job as a JSON object"),
    (b" \n", "invalid_body", "the body is empty; send the job as a JSON object"),
    (b"null", "invalid_body", "JSON object"),
    (b"[]", "invalid_body", "JSON object"),
]


def test_a_wrong_body_is_a_400_that_says_where(http: httpx.Client) -> None:
    for body, code, told in WRONG:
        answer = http.post(JOBS, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (400, code, "invalid_request_error"), error
        assert told in error["message"]


def test_a_long_body_is_refused_whether_its_length_is_declared_or_not(http: httpx.Client) -> None:
    long = b'{"model": "' + b"x" * MAX_BODY_BYTES + b'"}'
    for content in (long, iter([long[: len(long) // 2], long[len(long) // 2 :]])):
        answer = http.post(JOBS, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert "1048576 bytes" in answer.json()["error"]["message"]
    assert http.post(JOBS, content=long[: MAX_BODY_BYTES - 2] + b'"}').status_code == 400


def test_a_body_of_many_keys_costs_time_in_proportion() -> None:
    keys = ",".join(f'"{n:x}":1' for n in range(60_000))
    begin = time.perf_counter()
    with pytest.raises(InvalidRequestError, match='"ea5f" stands twice'):
        parse_body(f'{{{keys},"ea5f":1}}'.encode())
    assert time.perf_counter() - begin < 2


def test_other_requests_are_answered_while_a_body_is_parsed(
    http: httpx.Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def parse_slowly(body: bytes) -> object:
        begun.set()
        assert may_end.wait(20)
        return parse_body(body)

    monkeypatch.setattr(bodies, "parse_body", parse_slowly)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, JOBS, content=b"[]")
        try:
            assert begun.wait(10)
            assert httpx.get(f"{url}/healthz", timeout=5, trust_env=False).status_code == 200
        finally:
            may_end.set()
        assert answer.result().status_code == 400


def test_a_right_body_is_the_same_as_for_any_parser() -> None:
    assert parse_body(b'\xef\xbb\xbf{"a": [1, 2.5, null, true, "\\u00e9"]}') == {"a": [1, 2.5, None, True, "é"]}
    with pytest.raises(InvalidRequestError):
        parse_body(b"{'a': 1}")
