"""Uploads: what comes is kept to the byte, what is refused leaves nothing, and memory does not grow with the file."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import psutil
import pytest
from openai.types import FileObject

from api import reports
from api.main import make_app
from cli.starting import find_free_port
from store.models import File
from store.session import open_session
from store.settings import Settings, get_settings
from tests.api.service import ROW, serve, upload

BOUNDARY = "xyz"
MIB = 2**20


def make_form(content: bytes, filename: str = "train.jsonl") -> bytes:
    part = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
    head = f'{part}"purpose"\r\n\r\nfine-tune\r\n{part}"file"; filename="{filename}"\r\n\r\n'
    return head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def list_left_over() -> list[Path]:
    """Files of uploads and objects that lie in the data folder."""
    return [path for path in get_settings().data_dir.rglob("*") if path.is_file()]


def count_rows() -> int:
    with open_session() as session:
        return session.query(File).count()


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def make_head(key: str, *lines: str) -> bytes:
    own = (f"Authorization: Bearer {key}", f"Content-Type: multipart/form-data; boundary={BOUNDARY}", *lines)
    return "\r\n".join(["POST /v1/files HTTP/1.1", "Host: x", *own, "", ""]).encode()


def read_answer(client: socket.socket) -> str:
    """Everything until the server closes the connection; a reset raises."""
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found.decode()


def test_an_upload_is_kept_to_the_byte_and_described(http: httpx.Client) -> None:
    content = (ROW * 3).encode() + b"\r\n\r\n"
    answer = upload(http, content)
    assert answer.status_code == 200
    file = answer.json()
    FileObject.model_validate(file, strict=True)
    assert set(FileObject.model_fields) <= set(file)
    assert file == http.get(f"/v1/files/{file['id']}").json()
    assert file["object"] == "file" and file["purpose"] == "fine-tune" and file["filename"] == "train.jsonl"
    assert (file["status"], file["status_details"], file["bytes"]) == ("processed", None, len(content))
    assert file["sha256"] == hashlib.sha256(content).hexdigest()
    assert abs(file["created_at"] - time.time()) < 60
    assert http.get(f"/v1/files/{file['id']}/content").content == content
    report = http.get(f"/v1/files/{file['id']}/report").json()
    assert (report["format"], report["rows"], report["errors"], report["error_count"]) == ("chat", 3, [], 0)
    assert not list((get_settings().data_dir / "uploads").iterdir())


def test_bytes_that_look_like_a_boundary_are_kept(http: httpx.Client) -> None:
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    for content in (b"\r" * 200_000, b"\r\n--" * 30_000, f"\r\n--{BOUNDARY}".encode()[:-1] * 20_000):
        file = http.post("/v1/files", content=make_form(content), headers=kind).json()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_name_is_a_label_only(http: httpx.Client) -> None:
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    for given, kept in (
        ("file", "file"),
        ("", "file"),
        ("Übung 数据 🕷.jsonl", "Übung 数据 🕷.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\a.jsonl", "a.jsonl"),
        ("a\\nb\x01.jsonl", "nb.jsonl"),
        ('say \\"hi\\"; x=1.jsonl', 'say "hi"; x=1.jsonl'),
        ("a" * 400, "a" * 255),
    ):
        form = make_form(ROW.encode(), given)
        file = http.post("/v1/files", content=form, headers=kind).json()
        assert (file["filename"], file["status"]) == (kept, "processed")
        content = http.get(f"/v1/files/{file['id']}/content")
        assert content.text == ROW
        assert content.headers["content-disposition"].startswith('attachment; filename="')
        assert unquote(content.headers["content-disposition"].split("UTF-8''")[1]) == kept
        assert content.headers["x-content-type-options"] == "nosniff"


def test_a_name_that_is_given_in_its_encoded_form_alone_is_kept(http: httpx.Client) -> None:
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    for given, kept in (
        ("; filename*=UTF-8''%C3%9Cbung%20%F0%9F%95%B7.jsonl", "Übung 🕷.jsonl"),
        ("; filename*=utf-8'de'..%2F..%2Fa.jsonl", "a.jsonl"),
        ("; filename=plain.jsonl; filename*=UTF-8''other.jsonl", "plain.jsonl"),
        ("", "file"),
    ):
        form = make_form(ROW.encode(), "@").replace(b'; filename="@"', given.encode())
        assert http.post("/v1/files", content=form, headers=kind).json()["filename"] == kept


def test_a_file_with_bad_rows_is_kept_so_that_its_report_can_be_read(http: httpx.Client) -> None:
    file = upload(http, ROW + '{"messages": 7}\n' + '{"messages": [,]}\n').json()
    assert file["status"] == "error" and file["status_details"].startswith("line 2, messages: ")
    report = http.get(f"/v1/files/{file['id']}/report").json()
    assert [error["line"] for error in report["errors"]] == [2, 3]
    assert report["error_count"] == 2 and report["rows"] == 3
    assert {"line", "path", "code", "message"} == set(report["errors"][0])


@pytest.mark.parametrize(("limit", "value"), [("MEMORY_BYTES", 16 * MIB), ("WALL_S", 0.01)])
def test_a_file_that_breaks_its_reader_is_an_error_in_the_report(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(reports, limit, value)
    file = upload(http).json()
    assert file["status"] == "error" and "could not be read" in file["status_details"]
    [error] = http.get(f"/v1/files/{file['id']}/report").json()["errors"]
    assert (error["line"], error["code"]) == (0, "unreadable_file")


def test_what_is_wrong_with_a_form_is_told_by_its_part(http: httpx.Client) -> None:
    file = {"file": ("a.jsonl", ROW)}
    cases = [
        ({"files": file}, "purpose", "missing_field"),
        ({"files": {"purpose": (None, "fine-tune")}}, "file", "missing_field"),
        ({"files": file, "data": {"purpose": "assistants"}}, "purpose", "not_offered"),
        ({"files": file, "data": {"purpose": "fun"}}, "purpose", "invalid_value"),
        ({"files": file, "data": {"purpose": "x" * 5000}}, "purpose", "invalid_value"),
        ({"files": file, "data": {"purpose": ["fine-tune", "fine-tune"]}}, "purpose", "invalid_value"),
        ({"files": {**file, "more": ("b", "b")}, "data": {"purpose": "fine-tune"}}, "more", "unknown_field"),
        ({"files": file, "data": {"expires_after[seconds]": "9"}}, "expires_after", "not_offered"),
        ({"files": [("", ("b", "b"))]}, None, "invalid_form"),
        ({"json": {"purpose": "fine-tune"}}, None, "invalid_form"),
        ({"data": {"purpose": "fine-tune"}}, None, "invalid_form"),
        ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, None, "invalid_form"),
    ]
    for request, param, code in cases:
        answer = http.post("/v1/files", **request)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), request
        assert error["type"] == "invalid_request_error" and error["message"]
    assert count_rows() == 0 and list_left_over() == []


def test_a_form_without_its_end_is_refused(http: httpx.Client) -> None:
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    whole = make_form(ROW.encode()).removesuffix(b"\r\n")
    for cut in (20, 90, -1, -8, -30):
        answer = http.post("/v1/files", content=whole[:cut], headers=kind)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        assert list_left_over() == []
    assert http.post("/v1/files", content=whole + b"\r\nan epilogue", headers=kind).status_code == 200


def test_the_limit_is_the_size_of_the_file(http: httpx.Client, small_limit: int) -> None:
    assert upload(http, b"\n" * small_limit).status_code == 200
    for content in (b"\n" * (small_limit + 1), b"\n" * (2 * small_limit)):
        answer = upload(http, content)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (413, "too_large", "file")
        assert "1048576 bytes (1 MiB)" in error["message"]
    assert count_rows() == 1


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("over_bytes", [100_000, 3 * MIB])
def test_a_client_that_sends_all_before_it_listens_gets_the_answer(
    url: str, key: str, small_limit: int, over_bytes: int, close: bool
) -> None:
    form = make_form(b"x" * (small_limit + over_bytes))
    closing = ["Connection: close"] if close else []
    with connect(url) as client:
        client.sendall(make_head(key, f"Content-Length: {len(form)}", *closing))
        client.sendall(form)
        answer = read_answer(client)
    assert answer.startswith("HTTP/1.1 413") and "1048576 bytes" in answer
    assert count_rows() == 0 and list_left_over() == []


def test_a_body_of_unknown_length_is_refused_at_the_limit(
    http: httpx.Client, url: str, key: str, small_limit: int
) -> None:
    form = make_form(b"x" * (small_limit + 3 * MIB))
    with connect(url) as client:
        client.sendall(make_head(key, "Transfer-Encoding: chunked"))
        for start in range(0, len(form), 100_000):
            piece = form[start : start + 100_000]
            client.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        assert read_answer(client).startswith("HTTP/1.1 413")
    assert count_rows() == 0 and list_left_over() == []


def test_a_client_that_asks_first_is_refused_before_it_sends(url: str, key: str, small_limit: int) -> None:
    with connect(url) as client:
        client.sendall(make_head(key, "Content-Length: 99999999", "Expect: 100-continue"))
        assert read_answer(client).startswith("HTTP/1.1 413")


def test_a_refused_client_that_never_stops_is_cut_off(key: str, small_limit: int) -> None:
    with serve(make_app()) as url, connect(url) as client, pytest.raises(ConnectionError):
        client.sendall(make_head(key, "Content-Length: 99999999999"))
        for _ in range(200):
            client.sendall(b"x" * MIB)


@pytest.mark.parametrize("sent", [0, 100, 300_000])
def test_an_upload_that_is_broken_off_leaves_nothing(http: httpx.Client, url: str, key: str, sent: int) -> None:
    form = make_form(ROW.encode() * 5000)
    with connect(url) as client:
        client.sendall(make_head(key, f"Content-Length: {len(form)}") + form[:sent])
        time.sleep(0.1)
    limit = time.monotonic() + 5
    while list_left_over() and time.monotonic() < limit:
        time.sleep(0.02)
    assert list_left_over() == [] and count_rows() == 0
    assert http.get("/v1/files").json()["data"] == []


def test_what_a_killed_process_left_goes_at_the_next_start(database: Settings) -> None:
    folder = database.data_dir / "uploads"
    folder.mkdir(parents=True)
    (folder / "recent").touch()
    (folder / "old").touch()
    os.utime(folder / "old", (1, 1))
    with serve(make_app()):
        assert [path.name for path in folder.iterdir()] == ["recent"]


def test_memory_does_not_grow_with_the_file(database: Settings, key: str) -> None:
    port = find_free_port()
    command = [sys.executable, "-m", "uvicorn", "api.main:app", "--port", str(port), "--no-access-log"]
    with subprocess.Popen(command, env=os.environ.copy(), stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_alive(url)
            headers = {"Authorization": f"Bearer {key}", "Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            service = psutil.Process(process.pid)

            def send(count: int) -> None:
                answer = httpx.post(f"{url}/v1/files", content=stream_form(count), headers=headers, timeout=60)
                assert answer.status_code == 200 and answer.json()["bytes"] == count * MIB, answer.text

            send(10)
            before = read_peak_bytes(service)
            send(100)
            assert read_peak_bytes(service) - before < 30 * MIB
        finally:
            process.terminate()


def stream_form(count: int) -> Iterator[bytes]:
    head, tail = make_form(b"#").split(b"#")
    yield head
    row = ROW.encode().rstrip()
    for _ in range(count):
        yield row + b" " * (MIB - len(row) - 1) + b"\n"
    yield tail


def read_peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def wait_until_alive(url: str) -> None:
    limit = time.monotonic() + 20
    while True:
        try:
            httpx.get(f"{url}/healthz", trust_env=False)
            return
        except httpx.TransportError:
            assert time.monotonic() < limit
            time.sleep(0.05)
