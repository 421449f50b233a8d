"""Bytes of files, checkpoints and adapters: one object store, a local folder or S3, GCS or Azure by URL."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from store.settings import get_settings

CHUNK_BYTES = 4 * 2**20


class ObjectStoreError(OSError):
    """The object store is full, away, or refuses us. Worth another try, like any fault of a disk."""


@contextmanager
def _as_os_error() -> Iterator[None]:
    """obstore's own errors are no OSError, but for a missing object."""
    try:
        yield
    except BaseError as bad:
        is_full = "StorageFull" in str(bad) or "No space left" in str(bad)
        message = str(bad).splitlines()[0]
        raise ObjectStoreError(errno.ENOSPC if is_full else errno.EIO, f"the object store: {message}") from bad


@cache
def get_object_store() -> ObjectStore:
    url = get_settings().artifacts
    options: dict[str, Any] = {"mkdir": True} if url.startswith("file://") else {}
    return from_url(url, **options)


def put_file(key: str, path: Path) -> None:
    """Upload a file in pieces; an object is there whole or not at all."""
    with _as_os_error():
        obstore.put(get_object_store(), key, path, chunk_size=CHUNK_BYTES, max_concurrency=2)


def stream(key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The bytes from `start` up to but not including `end`, in pieces of bounded size.

    Raises:
        FileNotFoundError: no such object; before the first piece.
    """
    store = get_object_store()
    if end is None:
        with _as_os_error():
            end = obstore.head(store, key)["size"]
    return _pieces(store, key, start, end)


def get_file(key: str, target: Path) -> None:
    """Download an object to a file that is there whole or not at all."""
    beside = target.with_name(f".{target.name}.part")
    with beside.open("wb") as file:
        for piece in stream(key):
            file.write(piece)
    beside.replace(target)


def delete(key: str) -> None:
    """Remove an object; one that is not there is no error."""
    with suppress(FileNotFoundError), _as_os_error():
        obstore.delete(get_object_store(), key)


def list_keys(prefix: str) -> Iterator[str]:
    """The keys of all objects below a prefix."""
    with _as_os_error():
        for page in obstore.list(get_object_store(), prefix):
            yield from (entry["path"] for entry in page)


def _pieces(store: ObjectStore, key: str, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        with _as_os_error():
            piece = bytes(obstore.get_range(store, key, start=start, end=min(start + CHUNK_BYTES, end)))
        yield piece
        start += len(piece)
