"""JSON bodies, read within a limit and parsed strictly."""

import json

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from api.errors import TooLargeError
from store.errors import InvalidRequestError
from training.jsonlines import Malformed, iterate_texts, parse_json

MAX_BODY_BYTES = 2**20


async def read_json(request: Request) -> object:
    """The body as a JSON value; None for an empty one."""
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    # Not on the event loop: a large body takes a while.
    return await run_in_threadpool(parse_body, bytes(body)) if body.strip() else None


def parse_body(body: bytes) -> object:
    """Strict JSON: no key twice, no NaN, no absurd depth, no NUL in a text, which the database could not keep.

    Raises:
        InvalidRequestError: with the place of the fault.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as bad:
        raise InvalidRequestError(f"the body is not UTF-8 at byte {bad.start + 1}", code="invalid_json") from None
    try:
        value: object = parse_json(text)
    except Malformed as bad:
        raise _explain(text, bad) from None
    for path, found in iterate_texts(value):
        if "\0" in found:
            path = path.replace("\0", "\\u0000")
            raise InvalidRequestError(f"{path}: a NUL character (\\u0000); take it out", param=path)
    return value


def _explain(text: str, bad: Malformed) -> InvalidRequestError:
    """The parser's words are for the lines of a data file; the syntax of a body is told by its own line and column."""
    try:
        json.loads(text)
    except json.JSONDecodeError as syntax:
        place = f"line {syntax.lineno}, column {syntax.colno}"
        return InvalidRequestError(f"the body is not JSON: {place}: {syntax.msg}", code="invalid_json")
    except (RecursionError, ValueError):
        pass  # Not about the syntax: the parser has said what.
    where = f"{bad.path}: " if bad.path else ""
    return InvalidRequestError(f"the body is refused: {where}{bad.message}", param=bad.path or None, code=bad.code)


def _too_large() -> TooLargeError:
    return TooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes (1 MiB), the limit for JSON")
