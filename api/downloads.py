"""Answers that are the bytes of an object: validators, and one range (RFC 9110, sections 13 and 14)."""

import re
from collections.abc import Iterator
from itertools import chain
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from api.errors import PreconditionError, RangeError
from store import artifacts

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.IGNORECASE)


def make_download(
    request: Request, object_key: str, *, size_bytes: int, sha256: str, filename: str, media_type: str
) -> Response:
    """The object, or the part of it that was asked for, or only its headers; always to be saved, never to be shown.

    Raises:
        RangeError: the range begins behind the end.
        PreconditionError: If-Match names other bytes.
    """
    etag = f'"{sha256}"'
    if not _is_wanted(etag, request.headers.get("if-match")):
        raise PreconditionError(f"these are not the bytes that If-Match names; their tag is {etag}", param="If-Match")
    headers = {"etag": etag, "accept-ranges": "bytes", "content-disposition": _make_disposition(filename)}
    if _is_among(etag, request.headers.get("if-none-match")):
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        return Response(headers={**headers, "content-length": str(size_bytes)}, media_type=media_type)
    asked = request.headers.get("range") if request.headers.get("if-range", etag) == etag else None
    part = find_range(asked, size_bytes)
    start, end = part or (0, size_bytes)
    headers["content-length"] = str(end - start)
    if part is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size_bytes}"
    return StreamingResponse(_open(object_key, start, end), 206 if part else 200, headers, media_type)


def find_range(asked: str | None, size_bytes: int) -> tuple[int, int] | None:
    """First byte and end of a single range; None for the whole, also where the header is malformed or asks for several
    ranges, as the RFC allows.

    Raises:
        RangeError: the range is right, but lies behind the end.
    """
    match = _RANGE.fullmatch(asked or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= size_bytes:
        raise RangeError(size_bytes)
    return start, end


def _is_wanted(etag: str, header: str | None) -> bool:
    """Whether If-Match lets this pass; the comparison is strong there."""
    return header is None or header.strip() == "*" or etag in [tag.strip() for tag in header.split(",")]


def _is_among(etag: str, header: str | None) -> bool:
    """Whether If-None-Match names this; the comparison is weak there."""
    found = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return etag in found or found == ["*"]


def _open(object_key: str, start: int, end: int) -> Iterator[bytes]:
    """The first piece is read before the answer begins: a missing object is an error, not an empty download."""
    pieces = artifacts.stream(object_key, start, end)
    return chain([next(pieces, b"")], pieces)


def _make_disposition(filename: str) -> str:
    """RFC 6266: a plain name for old clients, and the real one in UTF-8."""
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
