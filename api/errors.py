"""Every error as one body: {"error": {message, type, param, code}}. docs/errors.md lists the codes."""

import logging
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from store.errors import ConflictError, InvalidRequestError, NotFoundError
from training.errors import BurnishError, DataError, Fault, ModelError, SpecError, StorageError
from training.fields import show

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class AuthenticationError(BurnishError):
    """No key, or not a right one."""

    code = "invalid_api_key"
    fault: Fault = "config"


class TooLargeError(BurnishError):
    """A body above its limit, which the message names."""

    code = "too_large"
    fault: Fault = "config"


class PreconditionError(ConflictError):
    """What If-Match names is not what is there."""


class RangeError(BurnishError):
    """A range that lies wholly behind the end."""

    code = "range_not_satisfiable"
    fault: Fault = "config"

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"the range begins behind the end: there are {size_bytes} bytes")
        self.size_bytes = size_bytes


_STATUS: dict[type[BurnishError], int] = {
    InvalidRequestError: 400,
    SpecError: 400,
    DataError: 400,
    ModelError: 400,
    AuthenticationError: 401,
    NotFoundError: 404,
    ConflictError: 409,
    PreconditionError: 412,
    TooLargeError: 413,
    RangeError: 416,
    StorageError: 507,
    BurnishError: 500,
}


def make_answer(
    status: int, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    error = {"message": message, "type": _type_of(status), "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


def make_fault_answer(request_id: str) -> JSONResponse:
    """What a client learns of a bug: the word under which the log holds the rest."""
    message = f"something went wrong on the side of the service; its log says what, under request id {request_id}"
    return make_answer(500, message, code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(BurnishError, _answer_ours)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    for kind in (OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(kind, _answer_database)


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "server_error" if status >= 500 else "invalid_request_error"


async def _answer_ours(request: Request, bad: Exception) -> JSONResponse:
    assert isinstance(bad, BurnishError)  # noqa: S101 - for the type checker
    status = next(_STATUS[kind] for kind in type(bad).__mro__ if kind in _STATUS)
    if status >= 500:
        log.error("%s %r: %s", request.method, request.scope["path"], bad.message, exc_info=bad)
    return make_answer(status, bad.message, code=bad.code, param=bad.param, headers=_headers_for(bad))


def _headers_for(bad: BurnishError) -> dict[str, str]:
    match bad:
        case AuthenticationError():
            return {"WWW-Authenticate": "Bearer"}
        case ConflictError():
            # Clients repeat a bare 409; the state that refused once will refuse again.
            return {"x-should-retry": "false"}
        case RangeError():
            return {"Content-Range": f"bytes */{bad.size_bytes}"}
    return {}


async def _answer_http(request: Request, bad: Exception) -> JSONResponse:
    assert isinstance(bad, HTTPException)  # noqa: S101 - for the type checker
    headers = dict(bad.headers or {})
    path = request.scope["path"][:200]
    if bad.status_code == 404:
        return make_answer(404, f"no such path: {path}", code="path_not_found", headers=headers)
    if bad.status_code == 405:
        # The header of the exception names the methods of one route only; several share a path.
        headers = {**headers, "Allow": _list_methods(request)}
        message = f"{request.method} is not offered for {path}; offered: {headers['Allow']}"
        return make_answer(405, message, code="method_not_allowed", headers=headers)
    return make_answer(bad.status_code, str(bad.detail), code="invalid_request", headers=headers)


def _list_methods(request: Request) -> str:
    def is_offered(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return ", ".join(filter(is_offered, METHODS))


async def _answer_invalid(_request: Request, bad: Exception) -> JSONResponse:
    """A query parameter or header that FastAPI refused."""
    assert isinstance(bad, RequestValidationError)  # noqa: S101 - for the type checker
    first = bad.errors()[0]
    param = str(first["loc"][-1])
    given = first["input"]
    # All of a URL is text; a number in it is told as one.
    shown = given if isinstance(given, str) and re.fullmatch(r"-?[0-9]{1,40}", given) else show(given)
    message = f"{param}: {shown.removesuffix(' (text)')}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return make_answer(400, message, code="invalid_value", param=param)


async def _answer_database(request: Request, bad: Exception) -> JSONResponse:
    log.error("%s %r: the database does not answer: %s", request.method, request.scope["path"], bad)
    message = (
        f"the database does not answer; nothing was changed that you were not told of. Try again in {RETRY_AFTER_S} s"
    )
    return make_answer(503, message, code="database_unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})
