"""Receives a file as a multipart form: streamed to a temporary file, so that memory does not grow with it."""

import errno
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import Request
from python_multipart import MultipartParser

from api.forms import FORM_BYTES, UploadForm, find_boundary, too_large
from api.reports import make_report
from store.settings import get_settings
from training.errors import StorageError

STALE_S = 24 * 3600

_report_limiter = anyio.CapacityLimiter(2)
"""Reports take a core each; uploads wait for them without holding the threads of other requests."""


@dataclass(frozen=True)
class Upload:
    """A whole file that was received, with its row report; `path` is gone once the request is done."""

    path: Path
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    report: dict[str, Any]


async def receive_upload(request: Request) -> AsyncIterator[Upload]:
    """A dependency: the form's parts `purpose` and `file`.

    Raises:
        TooLargeError: as soon as it is known, also by the declared length.
        InvalidRequestError: a part is missing, unknown or wrong.
        StorageError: the disk is full.
    """
    limit_bytes = get_settings().max_upload_bytes
    if int(request.headers.get("content-length", 0)) > limit_bytes + FORM_BYTES:
        raise too_large(limit_bytes)
    boundary = find_boundary(request.headers.get("content-type"))
    with _disk_full_told(), tempfile.NamedTemporaryFile(dir=_uploads_folder()) as file:
        form = UploadForm(file, limit_bytes)
        parser = MultipartParser(boundary, form.callbacks())
        async for chunk in request.stream():
            form.feed(parser, chunk)
            await anyio.to_thread.run_sync(form.write)
        form.check()
        path = Path(file.name)
        report = await anyio.to_thread.run_sync(make_report, path, limiter=_report_limiter)
        yield Upload(path, form.filename or "file", form.fields["purpose"], form.size_bytes, form.sha256, report)


def remove_stale_uploads() -> None:
    """Temporary files that a killed process left behind."""
    for path in _uploads_folder().iterdir():
        with suppress(FileNotFoundError):  # Another process may clean up too.
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def _uploads_folder() -> Path:
    folder = get_settings().data_dir.resolve() / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _disk_full_told() -> Iterator[None]:
    try:
        yield
    except OSError as bad:
        if bad.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError("the disk of the service is full; its operator has to make room") from bad
        raise
