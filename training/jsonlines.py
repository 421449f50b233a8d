"""JSON lines: the objects of a file line by line, and in plain words what is wrong with bytes that are no such file."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MAX_LINE_BYTES = 64 * 2**20
"""Far above the context of any model; keeps memory bounded for a file that has no line breaks."""
MAX_DEPTH = 64
"""Lists and objects within each other; no data set needs more, and deeper ones are made to break readers."""
HEAD_BYTES = 2**18

ONE_A_LINE = 'write each example on one line, as an object of its own such as {"messages": [...]}'

_SIGNATURES = (
    (b"\x1f\x8b", "gzip", "compressed_file"),
    (b"PK\x03\x04", "a zip archive", "compressed_file"),
    (b"BZh", "bzip2", "compressed_file"),
    (b"\xfd7zXZ\x00", "xz", "compressed_file"),
    (b"\x28\xb5\x2f\xfd", "zstd", "compressed_file"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "compressed_file"),
    (b"Rar!", "a rar archive", "compressed_file"),
    (b"PAR1", "Parquet", "format_not_offered"),
    (b"ARROW1", "Arrow", "format_not_offered"),
    (b"Obj\x01", "Avro", "format_not_offered"),
    (b"\xff\xfe", "UTF-16", "not_utf8"),
    (b"\xfe\xff", "UTF-16", "not_utf8"),
    (b"{\x00", "UTF-16", "not_utf8"),
    (b"\x00{", "UTF-16", "not_utf8"),
    (b"\x00\x00\xfe\xff", "UTF-32", "not_utf8"),
    (b"\x00\x00\x00{", "UTF-32", "not_utf8"),
    (b"version https://git-lfs", "a Git LFS pointer", "git_lfs_pointer"),
    (b"<!doctype", "a web page", "not_json"),
    (b"<html", "a web page", "not_json"),
    (b"%pdf", "a PDF", "binary_file"),
    (b"sqlite format 3", "an SQLite database", "binary_file"),
)
_REMEDIES = {
    "compressed_file": "unpack it first and send the JSON lines inside",
    "format_not_offered": "which is not offered yet; save it as JSON lines: " + ONE_A_LINE,
    "not_utf8": "save it as UTF-8",
    "git_lfs_pointer": "not the data itself; fetch that with `git lfs pull` and send it",
    "not_json": "often the answer of a server in the place of the file; download it again",
    "binary_file": "not text; save the data as JSON lines: " + ONE_A_LINE,
}
_HEADER_CELL = re.compile(r'"?[^\W\d][\w .-]*"?')


class Malformed(Exception):
    """What is wrong with a line, at `path` in its object, or with the whole file, where reading ends.

    `example` is the first element of a file that is one JSON array.
    """

    def __init__(
        self, code: str, message: str, path: str = "", *, is_whole_file: bool = False, example: object = None
    ) -> None:
        self.code = code
        self.message = printable(message)
        self.path = printable(path)
        super().__init__(self.message)
        self.is_whole_file = is_whole_file
        self.example = example


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """The number of each line that is not blank, with its object or what is wrong with it.

    Lines end at LF alone. Nothing follows what is wrong with the file as a whole.
    """
    with path.open("rb") as file:
        if fault := _find_fault_of_file(file.read(HEAD_BYTES)):
            yield fault
            return
        file.seek(0)
        is_first = True
        for number, line in _read_lines(file):
            value = _parse_line(line)
            if is_first and isinstance(value, Malformed) and value.code == "unfinished_json":
                # Printed over several lines: every further line would be wrong too.
                yield number, Malformed(value.code, value.message, is_whole_file=True)
                return
            yield number, value
            is_first = False
    if is_first:
        message = f"the file is empty or holds blank lines only; {ONE_A_LINE}"
        yield 1, Malformed("empty_file", message, is_whole_file=True)


def parse_json(text: str) -> Any:
    """JSON, strictly: no duplicate keys, no NaN or Infinity, no half characters, no absurd depth.

    Raises:
        Malformed: with the column where it is about the syntax.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as bad:
        raise _explain(bad) from None
    except RecursionError:
        raise Malformed("too_deep", f"lists or objects more than {MAX_DEPTH} deep") from None
    except ValueError:  # Python's limit on the digits of a whole number.
        limit = sys.get_int_max_str_digits()
        raise Malformed("invalid_json", f"a number with too many digits; at most {limit} are read") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise Malformed("too_deep", f"lists or objects more than {MAX_DEPTH} deep")
    if re.search(r"\\u[dD]", text):
        _refuse_half_characters(value)
    return value


def kind_of(value: object) -> str:
    """What a JSON value is, as a person calls it."""
    kinds: dict[type, str] = {bool: "a boolean", str: "text", dict: "an object", list: "a list", type(None): "null"}
    return kinds.get(type(value), "a number")


def printable(text: str) -> str:
    """With escapes for what logs, databases and UTF-8 do not take: the texts of a file stand in its errors."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def iterate_texts(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, keys too, with its path such as `messages[1].content`."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            yield inner, key
            yield from iterate_texts(item, inner)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from iterate_texts(item, f"{path}[{index}]")


def _find_fault_of_file(head: bytes) -> tuple[int, Malformed] | None:
    """What the first bytes tell, and the line where it shows; a file's name is never looked at."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    line = 1 + head[: len(head) - len(start)].count(b"\n")
    if found := _find_foreign(head, start):
        name, code = found
        return line, Malformed(code, f"the file is {name}, {_REMEDIES[code]}", is_whole_file=True)
    if start.startswith(b"["):
        message = f"the file is one JSON array; {ONE_A_LINE}"
        return line, Malformed("json_array", message, is_whole_file=True, example=_first_of(start))
    return None


def _find_foreign(head: bytes, start: bytes) -> tuple[str, str] | None:
    """The name of a format that is not JSON, and its error code."""
    for signature, name, code in _SIGNATURES:
        if head.startswith(signature) or start[:32].lower().startswith(signature.lower()):
            return name, code
    if head[257:262] == b"ustar":
        return "a tar archive", "compressed_file"
    # NUL is left out: a text file with a run of them is better told the line.
    if sum(byte < 32 and byte not in b"\0\t\n\f\r" for byte in head[:4096]) > len(head[:4096]) / 20:
        return "binary", "binary_file"
    if columns := _find_columns(start.partition(b"\n")[0].decode("utf-8", "replace").strip()):
        return f"a table such as CSV or TSV (columns {', '.join(columns)})", "format_not_offered"
    return None


def _first_of(array: bytes) -> object:
    try:
        return json.JSONDecoder().raw_decode(array[1:].decode("utf-8", "ignore").lstrip())[0]
    except (ValueError, RecursionError):
        return None


def _find_columns(line: str) -> list[str]:
    """The cells of a line that can be nothing but the header of a table."""
    for delimiter in "\t,;|":
        cells = [cell.strip() for cell in line.split(delimiter)]
        if 1 < len(cells) < 100 and all(_HEADER_CELL.fullmatch(cell) for cell in cells):
            return [cell.strip('"') for cell in cells]
    return []


def _read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Physical numbers and bytes of the lines that are not blank; of one too long the first bytes only."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _parse_line(line: bytes) -> dict[str, Any] | Malformed:
    try:
        if len(line) > MAX_LINE_BYTES:
            limit_mib = MAX_LINE_BYTES // 2**20
            raise Malformed("line_too_long", f"the line is longer than {limit_mib} MiB; {ONE_A_LINE}")
        if b"\0" in line:
            at = line.index(b"\0") + 1
            raise Malformed("nul_byte", f"a NUL byte (0x00) at byte {at}, often left by a broken copy; write it anew")
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as bad:
        what = f"byte 0x{line[bad.start]:02X} at byte {bad.start + 1} is not UTF-8"
        return Malformed("not_utf8", f"{what}; save the file as UTF-8")
    except Malformed as bad:
        return bad
    if not isinstance(value, dict):
        return Malformed("not_an_object", f"{kind_of(value)}, an object expected; {ONE_A_LINE}")
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = _find_repeated(key for key, _ in pairs)
        raise Malformed("duplicate_key", f'duplicate key: "{twice[:80]}" stands twice in one object; keep one')
    return made


def _find_repeated(keys: Iterable[str]) -> str:
    """The first key that stands there for the second time. In linear time: whoever sends keys chooses how many."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise ValueError("no key stands there twice")


def _make_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Malformed("non_finite_number", f"{text[:40]} is too large for a number")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise Malformed("non_finite_number", f"{word} is no JSON; write null, or leave the field out")


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object, parse_float=_make_float, parse_constant=_refuse_constant)


def _is_deeper(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    return any(isinstance(item, dict | list) for item in level)


def _refuse_half_characters(value: object) -> None:
    for path, text in iterate_texts(value):
        if half := re.search(r"[\ud800-\udfff]", text):
            message = f"{half[0]} is one half of a character (a lone surrogate); write both halves"
            raise Malformed("lone_surrogate", message, path)


def _explain(bad: json.JSONDecodeError) -> Malformed:
    """A syntax error in words, by where the parser stopped; columns count characters from 1."""
    before, rest = bad.doc[: bad.pos].rstrip(), bad.doc[bad.pos :]
    place = f"at column {bad.pos + 1}"
    if bad.msg == "Extra data":
        return _explain_extra(rest, place)
    if not rest.strip() or bad.msg.startswith("Unterminated string"):
        what = "a text is not closed" if rest.strip() else "the line ends before its object is closed"
        return Malformed("unfinished_json", f"{what} {place}; each example has to stand on one line")
    if rest[0] == "\ufeff":
        return Malformed("invalid_json", f"a byte-order mark (U+FEFF) {place}; take it out")
    if not before and rest[0] not in "{[":
        return Malformed("not_json", f'no JSON: "{rest[:30].strip()}"; {ONE_A_LINE}')
    if (before.endswith(",") and rest[0] in "}]") or re.match(r",\s*[}\]]", rest):
        return Malformed("invalid_json", f"a trailing comma before the closing bracket {place}; take it out")
    return Malformed("invalid_json", _what_is_missing(bad.msg, rest).format(place=place))


def _explain_extra(rest: str, place: str) -> Malformed:
    if rest[0] in '{["':
        return Malformed(
            "several_values",
            f"more than one JSON value on the line, the second {place}; put each on one line of its own",
        )
    what = "a comma" if rest[0] == "," else f'"{rest[:20].strip()}"'
    return Malformed("invalid_json", f"{what} after the object {place}; take it out")


def _what_is_missing(parser_says: str, rest: str) -> str:
    if rest[0] == "'":
        return "a single quote {place}; JSON takes double quotes"
    if word := re.match(r"True|False|None|undefined", rest):
        return f"{word[0]} {{place}} is no JSON; write true, false or null"
    if parser_says.startswith("Invalid control character"):
        return (
            f"a raw control character (U+{ord(rest[0]):04X}) inside a text {{place}}; write it as \\n, \\t or \\u...."
        )
    if "escape" in parser_says:
        return "a backslash {place} that JSON does not know; write \\\\ for the sign itself"
    expected = {
        "Expecting ',' delimiter": 'a comma is missing {place}, or a quote inside a text is not written as \\"',
        "Expecting ':' delimiter": "a colon is missing {place}",
        "Expecting value": "a value is missing {place}",
    }
    return expected.get(parser_says, "a key in double quotes is expected {place}")
