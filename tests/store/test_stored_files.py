"""A file is a row and its bytes: both or none, and none is taken away from a job."""

import threading
from pathlib import Path
from typing import Any

import pytest

from store import artifacts
from store.errors import ConflictError, InvalidRequestError, NotFoundError
from store.files import clean_filename, create_file, delete_bytes, delete_file, get_file
from store.jobs import create_job
from store.models import File
from store.session import open_session
from store.settings import Settings
from tests.rows import make_file, make_project
from training.spec import parse_spec

PROJECT = "proj-default"


def make_arguments(folder: Path) -> dict[str, Any]:
    path = folder / "bytes"
    path.write_bytes(b"abc")
    report = {"format": "chat", "rows": 1, "errors": [], "error_count": 0, "warnings": []}
    return {"path": path, "filename": "a", "purpose": "fine-tune", "size_bytes": 3, "sha256": "d", "report": report}


def list_objects(database: Settings) -> list[str]:
    return [path.name for path in database.data_dir.rglob("artifacts/files/*")]


def test_a_file_is_made_read_and_removed(database: Settings, tmp_path: Path) -> None:
    with open_session() as session:
        make_project(session)
    with open_session() as session:
        made = create_file(session, PROJECT, **make_arguments(tmp_path))
    with open_session() as session:
        assert b"".join(artifacts.stream(get_file(session, PROJECT, made.id).object_key)) == b"abc"
        key = delete_file(session, PROJECT, made.id)
    assert list_objects(database) == [made.id]
    delete_bytes(key)
    delete_bytes(key)
    assert list_objects(database) == []


def test_bytes_whose_row_is_refused_do_not_stay(database: Settings, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="fk_files_project_id"), open_session() as session:
        create_file(session, "proj-none", **make_arguments(tmp_path))
    with pytest.raises(InvalidRequestError), open_session() as session:
        create_file(session, PROJECT, **{**make_arguments(tmp_path), "purpose": "batch"})
    assert list_objects(database) == []


def test_a_deletion_and_a_job_that_begins_at_once_do_not_cross(database: Settings) -> None:
    with open_session() as session:
        file = make_file(session)
    spec = parse_spec({"model": "tiny", "training_file": file.id})
    outcome: list[Exception | str] = []

    def delete() -> None:
        try:
            with open_session() as session:
                outcome.append(delete_file(session, PROJECT, file.id))
        except ConflictError as refused:
            outcome.append(refused)

    thread = threading.Thread(target=delete)
    with open_session() as session:
        create_job(session, PROJECT, spec, idempotency_key=None, is_retry=False)
        thread.start()
        thread.join(0.3)
        assert outcome == []  # It waits for the job that is being made.
    thread.join(10)
    assert isinstance(outcome[0], ConflictError)
    with open_session() as session:
        assert session.get(File, file.id) is not None
        with pytest.raises(NotFoundError):
            delete_file(session, "proj-other", file.id)


def test_a_name_is_cleaned_for_showing() -> None:
    names = {"a/b\\c.jsonl": "c.jsonl", "..": "..", "\x1b[31m\n": "[31m", "\u2028": "file", " ": "file", "\ud800a": "a"}
    assert {name: clean_filename(name) for name in names} == names
