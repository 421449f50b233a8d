"""What the documents say is so: settings are listed, links lead somewhere."""

import re
from pathlib import Path

from store.settings import Settings

ROOT = Path(__file__).parents[1]
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
