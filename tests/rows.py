"""Makers of rows for tests: each gives the least that is valid, and takes what the test is about."""

import itertools
from typing import Any

from sqlalchemy.orm import Session

from store.hosts import register_host
from store.jobs import create_job
from store.models import File, Job, Project
from training.hardware import Gpu, Hardware
from training.spec import parse_spec

_numbers = itertools.count()


def make_project(session: Session, name: str = "default") -> str:
    project_id = f"proj-{name}"
    if session.get(Project, project_id) is None:
        session.add(Project(id=project_id, name=name))
        session.flush()
    return project_id


def make_file(session: Session, project: str = "default", **columns: Any) -> File:
    number = next(_numbers)
    report = {"format": "chat", "rows": 2, "errors": [], "error_count": 0, "warnings": []}
    file = File(
        **{
            "id": f"file-{number}",
            "project_id": make_project(session, project),
            "filename": "train.jsonl",
            "purpose": "fine-tune",
            "bytes": 10,
            "sha256": "0" * 64,
            "object_key": f"files/file-{number}",
            "report": report,
            **columns,
        }
    )
    session.add(file)
    session.flush()
    return file


def make_job(session: Session, project: str = "default", **body: Any) -> Job:
    file = make_file(session, project)
    spec = parse_spec({"model": "tiny", "training_file": file.id, **body})
    return create_job(session, file.project_id, spec, idempotency_key=None, is_retry=False)


def make_host(session: Session, name: str = "alpha", gpus: int = 0, cpu_slots: int = 1) -> None:
    cards = tuple(Gpu(index=i, name="A100", memory_bytes=2**36, compute_capability=(8, 0)) for i in range(gpus))
    register_host(session, name, Hardware(gpus=cards, cpu_cores=2, memory_bytes=2**34), cpu_slots)
