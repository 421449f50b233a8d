"""Downloads: the whole, one range, or nothing where the client has it already."""

import hashlib
import random
import time
from pathlib import Path

import httpx
import pytest

from api.downloads import find_range
from api.errors import RangeError
from store import artifacts
from store.models import Artifact, Job
from store.session import open_session
from tests.api.service import upload
from tests.rows import make_job

CONTENT = random.Random(1).randbytes(5 * 2**20)  # Longer than one piece of the object store.
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def adapter(http: httpx.Client, tmp_path: Path) -> str:
    """The path of a job's adapter that can be downloaded."""
    path = tmp_path / "adapter.zip"
    path.write_bytes(CONTENT)
    with open_session() as session:
        job = make_job(session)
        key = f"artifacts/{job.id}"
        session.add(
            Artifact(job_id=job.id, kind="adapter", attempt=1, object_key=key, bytes=len(CONTENT), sha256=DIGEST)
        )
    artifacts.put_file(key, path)
    return f"/v1/fine_tuning/jobs/{job.id}/adapter"


def test_an_adapter_is_one_archive_with_its_digest_as_its_tag(http: httpx.Client, adapter: str) -> None:
    answer = http.get(adapter)
    assert answer.status_code == 200 and answer.content == CONTENT
    assert answer.headers["etag"] == f'"{DIGEST}"'
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-type"] == "application/zip"
    assert answer.headers["content-length"] == str(len(CONTENT))
    assert answer.headers["x-content-type-options"] == "nosniff"
    job_id = adapter.split("/")[-2]
    assert f'attachment; filename="{job_id}-adapter.zip"' in answer.headers["content-disposition"]
    head = http.head(adapter)
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "x-request-id": "", "date": ""} == {**answer.headers, "x-request-id": "", "date": ""}
    assert http.get(adapter, params={"format": "zip"}).status_code == 200
    error = http.get(adapter, params={"format": "tar"}).json()["error"]
    assert (error["param"], error["code"]) == ("format", "invalid_value")


def test_a_range_gives_its_bytes(http: httpx.Client, adapter: str) -> None:
    size = len(CONTENT)
    for asked, start, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=0-", 0, size),
        ("bytes=100-299", 100, 300),
        ("bytes=4194300-4194310", 4194300, 4194311),
        (f"bytes={size - 10}-", size - 10, size),
        (f"bytes={size - 10}-99999999", size - 10, size),
        ("bytes=-7", size - 7, size),
        ("bytes=-99999999", 0, size),
    ):
        answer = http.get(adapter, headers={"Range": asked})
        assert answer.status_code == 206 and answer.content == CONTENT[start:end], asked
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert answer.headers["content-length"] == str(end - start)


def test_a_download_that_was_cut_goes_on_only_with_the_same_bytes(http: httpx.Client, adapter: str) -> None:
    ask = {"Range": "bytes=1000-"}
    assert http.get(adapter, headers={**ask, "If-Range": f'"{DIGEST}"'}).status_code == 206
    for other in ('"another"', f'W/"{DIGEST}"', "Wed, 21 Oct 2015 07:28:00 GMT"):
        answer = http.get(adapter, headers={**ask, "If-Range": other})
        assert answer.status_code == 200 and answer.content == CONTENT


def test_what_the_client_has_is_not_sent_again(http: httpx.Client, adapter: str) -> None:
    for tags in (f'"{DIGEST}"', f'W/"{DIGEST}"', f'"x", "{DIGEST}"', "*"):
        answer = http.get(adapter, headers={"If-None-Match": tags})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == f'"{DIGEST}"'
    assert http.get(adapter, headers={"If-None-Match": '"x"'}).status_code == 200


def test_bytes_that_are_not_those_the_client_means_are_not_sent(http: httpx.Client, adapter: str) -> None:
    for tags in ('"x"', f'W/"{DIGEST}"', '"x", "y"', ""):
        for method in ("GET", "HEAD"):
            answer = http.request(method, adapter, headers={"If-Match": tags, "Range": "bytes=0-0"})
            assert answer.status_code == 412
        error = http.get(adapter, headers={"If-Match": tags}).json()["error"]
        assert (error["code"], error["param"]) == ("conflict", "If-Match") and DIGEST in error["message"]
    for tags in (f'"{DIGEST}"', f'"x", "{DIGEST}"', "*"):
        assert http.get(adapter, headers={"If-Match": tags}).content == CONTENT


def test_a_range_behind_the_end_is_refused_with_the_size(http: httpx.Client, adapter: str) -> None:
    for asked in ("bytes=5242880-", "bytes=99999999-999999999", "bytes=-0"):
        answer = http.get(adapter, headers={"Range": asked})
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{len(CONTENT)}"
        assert answer.json()["error"]["code"] == "range_not_satisfiable"


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=5-2",
        "bytes=0-1,5-9",
        "items=0-1",
        f"bytes={'9' * 5000}-",
        "bytes=٣-",
    ],
)
def test_a_range_that_is_none_is_ignored(asked: str) -> None:
    assert find_range(asked, 100) is None


def test_many_ranges_cost_nothing() -> None:
    asked = "bytes=" + ",".join(f"{n}-" for n in range(10_000))
    begin = time.perf_counter()
    assert find_range(asked, 10**9) is None
    assert time.perf_counter() - begin < 0.05


def test_nothing_of_an_empty_file_is_in_a_range() -> None:
    with pytest.raises(RangeError):
        find_range("bytes=0-", 0)


def test_a_job_without_an_adapter_says_why(http: httpx.Client) -> None:
    with open_session() as session:
        job = make_job(session)
    path = f"/v1/fine_tuning/jobs/{job.id}/adapter"
    answer = http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "result_not_ready")
    assert "queued" in answer.json()["error"]["message"]
    http.post(f"/v1/fine_tuning/jobs/{job.id}/cancel")
    assert http.get(path).json()["error"]["code"] == "result_not_found"
    assert (http.head(path).status_code, http.head(path).content) == (404, b"")


def test_a_lost_object_is_an_error_and_not_an_empty_download(http: httpx.Client, adapter: str) -> None:
    with open_session() as session:
        for job in session.query(Job):
            artifacts.delete(f"artifacts/{job.id}")
    answer = http.get(adapter)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_a_file_is_downloaded_in_the_same_way(http: httpx.Client) -> None:
    file = upload(http, CONTENT).json()
    path = f"/v1/files/{file['id']}/content"
    assert http.get(path).content == CONTENT
    assert http.get(path, headers={"Range": "bytes=-3"}).content == CONTENT[-3:]
    assert http.head(path).headers["etag"] == f'"{DIGEST}"'
    assert http.get(path).headers["content-type"] == "application/octet-stream"
