"""docs/errors.md lists the codes that the source gives, and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "store", "training", "worker")
INTERNAL = {"fenced"}
"""Codes that no user is told."""


def find_codes(tree: ast.AST) -> Iterator[str]:
    """Texts given as `code=`, as the class's `code`, under the key "code", or to what describes a row's fault."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="code", value=value):
                yield from texts(value)
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                yield from texts(value)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        yield from texts(value)
            case ast.Call(func=ast.Name(id="Malformed"), args=[code, *_]):
                yield from texts(code)
            case ast.Call(func=ast.Name(id="RowIssue"), args=[_, _, code, *_]):
                yield from texts(code)
            case ast.Assign(targets=[ast.Name(id="_REMEDIES")], value=ast.Dict(keys=keys)):
                yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def texts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=first, orelse=second):
            yield from texts(first)
            yield from texts(second)


def test_every_code_is_listed_and_every_listed_code_is_given() -> None:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    given = {code for path in paths for code in find_codes(ast.parse(path.read_text("utf-8")))} - INTERNAL
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "errors.md").read_text("utf-8"), re.MULTILINE)
    listed = {code for row in rows for code in re.findall(r"`([a-z0-9_]+)`", row)}
    assert len(given) > 50
    assert given - listed == set(), "not in docs/errors.md"
    assert listed - given == set(), "in docs/errors.md, but nowhere given"
