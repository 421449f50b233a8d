"""The form of an upload, taken as the parser finds it: fields to memory, the file to disk, both within limits."""

import hashlib
import re
from typing import IO, Any
from urllib.parse import unquote

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from api.errors import TooLargeError
from store.errors import InvalidRequestError
from store.files import check_purpose

FIELD_BYTES = 1024
FORM_BYTES = 64 * 1024
"""What a form may hold beside its file: headers, fields, boundaries."""

_ENCODED_NAME = re.compile(rb";\s*filename\*=UTF-8'[A-Za-z0-9-]*'([A-Za-z0-9%!#$&+.^_`|~-]+)", re.IGNORECASE)


class UploadForm:
    """Takes what the parser finds: fields to memory, the file to disk, both within limits."""

    def __init__(self, file: IO[bytes], limit_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0
        self._file, self._limit_bytes = file, limit_bytes
        self._sha256 = hashlib.sha256()
        self._unwritten: list[bytes] = []
        self._received_bytes = 0
        self._has_ended = False
        self._header, self._value, self._disposition = b"", b"", b""
        self._part, self._field = "", bytearray()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._take_header,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": self._take_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def feed(self, parser: MultipartParser, chunk: bytes) -> None:
        self._received_bytes += len(chunk)
        if self._received_bytes > self._limit_bytes + FORM_BYTES:
            raise too_large(self._limit_bytes)
        try:
            parser.write(chunk)
        except FormParserError as bad:
            raise InvalidRequestError(f"the form cannot be read: {bad}", code="invalid_form") from None

    def write(self) -> None:
        """Bring to disk what the last chunk held; blocks."""
        for data in self._unwritten:
            self._file.write(data)
            self._sha256.update(data)
        self._unwritten.clear()

    def check(self) -> None:
        if not self._has_ended:
            raise InvalidRequestError("the form ends before its closing boundary", code="invalid_form")
        for name, found in (("file", self.filename), ("purpose", self.fields.get("purpose"))):
            if found is None:
                raise InvalidRequestError(
                    f"{name}: this part of the form is required", param=name, code="missing_field"
                )
        self._file.flush()

    def _begin_part(self) -> None:
        self._disposition, self._field = b"", bytearray()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _name_part(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise InvalidRequestError(f"{name}: given twice; leave one out", param=name)
        if not name:
            message = "a part of the form has no name; its parts are purpose and file"
            raise InvalidRequestError(message, code="invalid_form")
        if name == "file":
            self.filename = _find_filename(self._disposition, options)
        elif name.startswith("expires_after"):
            message = "expires_after: files that expire are not offered yet; leave the field out"
            raise InvalidRequestError(message, param="expires_after", code="not_offered")
        elif name != "purpose":
            message = f"{name[:80]}: unknown field; known are file, purpose"
            raise InvalidRequestError(message, param=name[:80], code="unknown_field")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self.size_bytes += end - start
            if self.size_bytes > self._limit_bytes:
                raise too_large(self._limit_bytes)
            self._unwritten.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > FIELD_BYTES:
            raise InvalidRequestError(f"{self._part}: longer than {FIELD_BYTES} bytes", param=self._part)

    def _end_part(self) -> None:
        if self._part != "file":
            self.fields[self._part] = self._field.decode("utf-8", "replace")
            check_purpose(self.fields[self._part])

    def _end(self) -> None:
        self._has_ended = True


def _find_filename(disposition: bytes, options: dict[bytes, bytes]) -> str:
    """The plain name, else the encoded one (RFC 8187), which some clients send alone though forms have none."""
    if b"filename" not in options and (encoded := _ENCODED_NAME.search(disposition)):
        return unquote(encoded[1].decode("ascii"), errors="replace")
    return options.get(b"filename", b"file").decode("utf-8", "replace")


def find_boundary(content_type: str | None) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        message = "a file is sent as multipart/form-data with the parts purpose and file"
        raise InvalidRequestError(message, code="invalid_form")
    return boundary


def too_large(limit_bytes: int) -> TooLargeError:
    limit = f"{limit_bytes} bytes ({limit_bytes / 2**20:.4g} MiB)"
    return TooLargeError(f"the file is larger than {limit}, the limit of this service; split it", param="file")
