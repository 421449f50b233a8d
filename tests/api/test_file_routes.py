"""Listing and deleting files."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx

from store.models import Job
from store.session import open_session
from store.settings import get_settings
from store.status import JobStatus
from tests.api.service import upload
from tests.rows import make_file, make_job


def make_files(count: int) -> list[str]:
    with open_session() as session:
        return [make_file(session).id for _ in range(count)]


def test_files_are_listed_in_pages_in_both_orders(http: httpx.Client) -> None:
    made = make_files(7)
    for order, expected in (("desc", made[::-1]), ("asc", made)):
        seen: list[str] = []
        while True:
            ask = {"limit": 3, "order": order, **({"after": seen[-1]} if seen else {})}
            page = http.get("/v1/files", params=ask).json()
            seen += [file["id"] for file in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
        assert seen == expected


def test_a_purpose_filters(http: httpx.Client) -> None:
    make_files(2)
    assert len(http.get("/v1/files", params={"purpose": "fine-tune"}).json()["data"]) == 2
    empty = http.get("/v1/files", params={"purpose": "batch"}).json()
    assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


def test_the_large_limits_of_the_openai_api_are_taken_and_wrong_ones_refused(http: httpx.Client) -> None:
    make_files(101)
    page = http.get("/v1/files", params={"limit": 10_000}).json()
    assert (len(page["data"]), page["has_more"]) == (100, True)
    for name, value in (("limit", "0"), ("limit", "10001"), ("limit", "x"), ("order", "up"), ("after", "file-none")):
        answer = http.get("/v1/files", params={name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert value in answer.json()["error"]["message"]


def test_a_deleted_file_is_gone_with_its_bytes(http: httpx.Client) -> None:
    file_id = upload(http).json()["id"]
    stored = get_settings().data_dir / "artifacts" / "files" / file_id
    assert stored.exists()
    assert http.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    assert not stored.exists()
    for method, tail in (("GET", ""), ("GET", "/content"), ("GET", "/report"), ("DELETE", "")):
        answer = http.request(method, f"/v1/files/{file_id}{tail}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
    assert http.get("/v1/files").json()["data"] == []


def test_a_file_is_kept_while_a_job_needs_it(http: httpx.Client) -> None:
    with open_session() as session:
        other = make_file(session)
        job = make_job(session, validation_file=other.id)
    for file_id in (job.training_file, other.id):
        answer = http.delete(f"/v1/files/{file_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "file_in_use")
        assert answer.headers["x-should-retry"] == "false"
        assert job.id in answer.json()["error"]["message"]
    with open_session() as session:
        session.get_one(Job, job.id).status = JobStatus.FAILED
    assert http.delete(f"/v1/files/{job.training_file}").status_code == 200


def test_of_parallel_deletes_one_wins_and_lists_go_on(http: httpx.Client) -> None:
    made = make_files(20)
    with ThreadPoolExecutor(16) as pool:
        lists = [pool.submit(http.get, "/v1/files") for _ in range(25)]
        deletes = [pool.submit(http.delete, f"/v1/files/{file_id}") for file_id in made for _ in range(2)]
        lists += [pool.submit(http.get, "/v1/files") for _ in range(25)]
    assert Counter(done.result().status_code for done in deletes) == {200: 20, 404: 20}
    assert {done.result().status_code for done in lists} == {200}
