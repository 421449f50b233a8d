"""Who gets in: every route but the listed ones asks for a key, before anything else happens."""

import socket

import httpx
from fastapi.routing import iter_route_contexts

from api.deps import PUBLIC_PATHS
from api.main import make_app
from store.keys import list_keys, make_first_key, make_key, revoke_key
from store.session import open_session
from tests.rows import make_file, make_job, make_project


def list_routes() -> set[tuple[str, str]]:
    """Every method and path that the application knows, also those that its document leaves out."""
    found = iter_route_contexts(make_app().routes)
    return {(method, route.path_format) for route in found if route.path for method in route.methods or ()}


def test_every_route_but_the_listed_ones_asks_for_a_key(url: str, key: str) -> None:
    routes = list_routes()
    documented = {(method.upper(), path) for path, item in make_app().openapi()["paths"].items() for method in item}
    assert documented < routes
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    with httpx.Client(base_url=url, trust_env=False) as http:
        for path in {path for _, path in routes}:
            for method in methods:
                answer = http.request(method, path.format(file_id="x", job_id="x", model="x"))
                known = (method, path) in routes
                if path in PUBLIC_PATHS or path == "/openapi.json":
                    assert answer.status_code != 401
                elif known:
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"] == "Bearer"
                else:
                    assert answer.status_code in (401, 405), (method, path)
        assert http.get("/openapi.json").status_code == 200


def test_a_wrong_key_is_refused(url: str, key: str) -> None:
    unknown = "bk-0123456789abcdef-" + "A" * 43
    for header in (None, "", "Bearer", "Basic abc", "Bearer EMPTY", f"Bearer {unknown}", "Bearer \xff"):
        headers = {} if header is None else {b"authorization": header.encode("latin-1")}
        answer = httpx.get(f"{url}/v1/files", headers=headers, trust_env=False)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (401, "authentication_error", None)
        assert error["code"] in ("missing_api_key", "invalid_api_key")


def test_a_key_with_one_other_character_and_a_revoked_key_are_refused(http: httpx.Client, url: str, key: str) -> None:
    assert http.get("/v1/files").status_code == 200
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    assert httpx.get(f"{url}/v1/files", headers={"Authorization": f"Bearer {wrong}"}).status_code == 401
    with open_session() as session:
        revoke_key(session, list_keys(session)[0].id)
    assert http.get("/v1/files").status_code == 401


def test_the_key_is_checked_before_the_body_is_read(url: str, key: str) -> None:
    address = url.removeprefix("http://").split(":")
    for path in ("/v1/files", "/v1/fine_tuning/jobs"):
        with socket.create_connection((address[0], int(address[1])), timeout=5) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 999999\r\n\r\n"
            client.sendall(head.encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 401")


def test_a_strange_host_header_changes_nothing(url: str, key: str) -> None:
    for host in ("a/?x=", "localhost/healthz?", "healthz"):
        answer = httpx.get(f"{url}/v1/files", headers={"Host": host}, trust_env=False)
        assert answer.status_code in (400, 401)


def test_what_another_project_owns_looks_exactly_like_what_does_not_exist(http: httpx.Client) -> None:
    with open_session() as session:
        others = [make_file(session, "other").id, make_job(session, "other").id]
    for path in (
        *("/v1/files/{}", "/v1/files/{}/content", "/v1/files/{}/report"),
        *(f"/v1/fine_tuning/jobs/{{}}{tail}" for tail in ("", "/events", "/checkpoints", "/metrics", "/adapter")),
    ):
        for known in others:
            unknown = known[:-1] + "zz"
            theirs, nobodys = http.get(path.format(known)), http.get(path.format(unknown))
            assert (theirs.status_code, nobodys.status_code) == (404, 404)
            assert theirs.text == nobodys.text.replace(unknown, known)
    assert http.delete(f"/v1/files/{others[0]}").status_code == 404
    assert http.post(f"/v1/fine_tuning/jobs/{others[1]}/cancel").status_code == 404
    assert http.get("/v1/files").json()["data"] == http.get("/v1/fine_tuning/jobs").json()["data"] == []


def test_a_key_of_another_project_opens_that_project_only(http: httpx.Client, url: str) -> None:
    with open_session() as session:
        make_job(session, "other")
        theirs = make_key(session, make_project(session, "other"), "second")
        assert make_first_key(session) is None
    headers = {"Authorization": f"Bearer {theirs}"}
    found = httpx.get(f"{url}/v1/fine_tuning/jobs", headers=headers, trust_env=False).json()["data"]
    assert [job["organization_id"] for job in found] == ["proj-other"]
