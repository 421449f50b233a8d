"""What the documents say is so: settings are listed, links lead somewhere."""

import ast
import re
from pathlib import Path
from typing import get_args

from store.settings import Settings
from training.devices import Strategy

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)`")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_setting_is_listed_with_its_description_and_no_other() -> None:
    listed = dict(re.findall(r"^\| `BURNISH_(\w+)` \| [^|]*\| (.*) \|$", (ROOT / "docs/settings.md").read_text(), re.M))
    said = {name.upper(): field.description for name, field in Settings.model_fields.items()}
    assert listed == said


def test_every_link_between_documents_leads_to_a_file() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_file_that_a_document_names_in_code_marks_is_there() -> None:
    ours = re.compile(r"`((?:api|cli|store|training|worker|docs|tests)/[\w/.-]+)`")
    for document in DOCUMENTS:
        for name in ours.findall(document.read_text("utf-8")):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_every_fault_of_trainers_has_a_test_that_is_there() -> None:
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs/training-faults.md").read_text("utf-8"), re.M)
    faults = [[cell.strip() for cell in row.split("|")] for row in rows if not row.startswith(("---", " fault "))]
    assert len(faults) > 35
    for fault, _, right, tests in faults:
        assert fault and right
        named = NAMED.findall(tests)
        assert named or tests.startswith("not offered"), fault
        for file, name in named:
            require_test(file, name)


def test_every_strategy_that_is_offered_has_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs/parallelism.md").read_text("utf-8"), re.M)
    assert {name for name, _ in rows} == set(get_args(Strategy))
    for name, cells in rows:
        named = NAMED.findall(cells)
        assert named, name
        for file, test in named:
            require_test(file, test)


def require_test(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests/training" / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
