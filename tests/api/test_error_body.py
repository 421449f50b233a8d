"""Every error has one body and a request id, whatever went wrong."""

import logging
import re
from collections.abc import Iterator

import httpx
import pytest

from api.routes import files
from store import session as store_session
from store import settings
from store.queue import get_celery


def error_of(answer: httpx.Response) -> dict[str, str]:
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"[A-Za-z0-9._-]+", answer.headers["x-request-id"])
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/filez", "/v1/files/", "/v1/files/a/b", "/docs", "/v1/files/..%2f..%2fetc"):
        answer = http.get(path)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "path_not_found"), path
    answer = http.put("/v1/files", content=b"x")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"
    assert "offered: GET, POST" in error_of(answer)["message"]
    for path, offered in (("/v1/files/a", "GET, DELETE"), ("/v1/files/a/content", "GET, HEAD"), ("/healthz", "GET")):
        assert http.put(path).headers["allow"] == offered
    error = error_of(http.get("/v1/models/"))
    assert error["code"] == "model_not_found" and "no name stands behind /v1/models/" in error["message"]


def test_a_wrong_query_names_its_parameter(http: httpx.Client) -> None:
    jobs = "/v1/fine_tuning/jobs"
    for path, name, value in (
        (jobs, "limit", "0"),
        (jobs, "limit", "101"),
        (jobs, "limit", "ten"),
        (jobs, "after", "ftjob-none"),
        (f"{jobs}/x/metrics", "max_points", "1"),
        (f"{jobs}/x/metrics", "from_step", "-1"),
        (f"{jobs}/x/metrics", "x", "tokens"),
        (f"{jobs}/x/metrics", "names", "train_loss,a b"),
    ):
        answer = http.get(path, params={name: value})
        error = error_of(answer)
        assert (answer.status_code, error["param"], error["code"]) == (400, name, "invalid_value"), error
        assert name in error["message"] and "(text)" not in error["message"]
    assert error_of(http.get(jobs, params={"limit": "0"}))["message"].startswith("limit: 0: input should be")
    assert error_of(http.get(jobs, params={"limit": "ten"}))["message"].startswith('limit: "ten": input should be')


def test_a_nul_in_the_url_is_refused(http: httpx.Client) -> None:
    for path in ("/v1/files/a%00b", "/v1/files?after=%00", "/v1/fine_tuning/jobs?metadata[a]=%00"):
        answer = http.get(path)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")


def test_the_request_id_is_the_clients_where_it_is_sane(http: httpx.Client) -> None:
    for path in ("/healthz", "/v1/files", "/v1/nothing"):
        assert http.get(path, headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
        for bad in ("a b", "x" * 200, "é", "a;b"):
            given = http.get(path, headers={b"x-request-id": bad.encode()}).headers["x-request-id"]
            assert given.startswith("req-")
    assert http.get("/healthz").headers["x-request-id"] != http.get("/healthz").headers["x-request-id"]


def test_a_bug_is_a_500_that_names_the_log_and_nothing_else(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(files.files, "list_files")
    with caplog.at_level(logging.ERROR):
        answer = http.get("/v1/files")
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert answer.headers["x-request-id"] in error["message"]
    assert "list_files" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text and "AttributeError" in caplog.text


@pytest.fixture
def no_database(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A database that does not answer from now on."""
    monkeypatch.setenv("BURNISH_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    store_session.get_engine().dispose()
    settings.get_settings.cache_clear()
    store_session.get_engine.cache_clear()
    yield
    monkeypatch.undo()


def test_without_the_database_the_client_is_told_when_to_come_back(http: httpx.Client, no_database: None) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/fine_tuning/jobs"), ("DELETE", "/v1/files/x")):
        answer = http.request(method, path)
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        assert "127.0.0.1" not in answer.text
    assert http.get("/healthz").json() == {"status": "ok"}


def test_readiness_names_the_database(http: httpx.Client, no_database: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = http.get("/readyz")
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (503, "not_ready")
    assert "the database does not answer" in error["message"] and "broker" not in error["message"]


def test_the_service_is_ready_when_all_answer(url: str) -> None:
    answer = httpx.get(f"{url}/readyz", trust_env=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "database": "ok", "broker": "ok"})


def test_readiness_names_the_broker(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.get_settings.cache_clear()
    get_celery.cache_clear()
    error = error_of(httpx.get(f"{url}/readyz", trust_env=False, timeout=30))
    assert error["message"] == "not ready: the broker does not answer"
