"""The tables. Time stamps are the database's clock; rows are loaded without hidden lazy queries."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Enum,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from store.status import AttemptStatus, JobStatus

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


def _words(states: type[StrEnum]) -> Enum:
    """A column that holds the word of a state; which moves are allowed stands in `ALLOWED_MOVES`."""
    return Enum(
        states, native_enum=False, create_constraint=False, length=32, values_callable=lambda e: [s.value for s in e]
    )


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own form
        str: Text(),
        int: BigInteger(),
        datetime: TIMESTAMP(timezone=True),
        dict[str, Any]: JSONB(),
        list[int]: ARRAY(Integer()),
        bytes: LargeBinary(),
        JobStatus: _words(JobStatus),
        AttemptStatus: _words(AttemptStatus),
    }


class Project(Base):
    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A key is `bk-<id>-<secret>`; only the SHA-256 of the whole text is kept."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    digest: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    revoked_at: Mapped[datetime | None]


class File(Base):
    """An uploaded file; its bytes lie in the object store under `object_key`."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "project_id", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int]
    sha256: Mapped[str]
    object_key: Mapped[str]
    report: Mapped[dict[str, Any] | None]
    "What `training.rows.make_report` found, for files that are trained on."
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Host(Base):
    """A worker host, alive while its heartbeat is recent."""

    __tablename__ = "hosts"

    name: Mapped[str] = mapped_column(primary_key=True)
    hardware: Mapped[dict[str, Any]]
    cpu_slots: Mapped[int]
    "Jobs at a time that train on the CPU."
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Job(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "project_id", "created_at"),
        Index("ix_jobs_queue", "priority", "created_at", postgresql_where=text("status = 'queued'")),
        Index(
            "uq_jobs_project_id_idempotency_key",
            "project_id",
            "idempotency_key",
            unique=True,
            postgresql_where=text("idempotency_key IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    spec: Mapped[dict[str, Any]]
    "As asked; never edited."
    spec_digest: Mapped[str]
    idempotency_key: Mapped[str | None]
    seed: Mapped[int]
    "As asked, else drawn when the job was made."
    model: Mapped[str]
    training_file: Mapped[str]
    validation_file: Mapped[str | None]
    priority: Mapped[int] = mapped_column(default=0)
    status: Mapped[JobStatus] = mapped_column(default=JobStatus.VALIDATING_FILES)
    desired_status: Mapped[JobStatus | None]
    "What was asked for and is not yet so; the only way back to a running attempt."
    attempt: Mapped[int] = mapped_column(default=0)
    "Number of the current attempt; writes of any other are refused."
    not_before: Mapped[datetime | None]
    "A queued job is not placed earlier (backoff between attempts)."
    plan: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    fine_tuned_model: Mapped[str | None]
    trained_tokens: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    finished_at: Mapped[datetime | None]


class Attempt(Base):
    """One try to run a job on one host."""

    __tablename__ = "attempts"
    __table_args__ = (Index("ix_attempts_open", "host_name", postgresql_where=text("status <> 'ended'")),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    host_name: Mapped[str] = mapped_column(ForeignKey("hosts.name"))
    gpus: Mapped[list[int]]
    "Indices of the GPUs it holds; empty on the CPU."
    status: Mapped[AttemptStatus] = mapped_column(default=AttemptStatus.PLACED)
    last_seq: Mapped[int] = mapped_column(default=0)
    "The newest event of its run directory that is stored."
    resumed_from: Mapped[int | None]
    "The step of the checkpoint that it went on from."
    placed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    claimed_at: Mapped[datetime | None]
    lease_expires_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None]
    exit_code: Mapped[int | None]
    stop_s: Mapped[float | None]
    "Seconds from the wish to end until no process was left."


class Event(Base):
    """What happened to a job, in order of `id`, as the API lists it."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "job_id", "id"),)

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int] = mapped_column(default=0)
    level: Mapped[str] = mapped_column(default="info")
    type: Mapped[str] = mapped_column(default="message")
    message: Mapped[str]
    step: Mapped[int | None]
    data: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Metric(Base):
    """All values of one optimizer step; a step stands here once, whatever number of attempts made it."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]


class Checkpoint(Base):
    """A whole checkpoint in the object store. This row is inserted last: it makes the checkpoint exist."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "job_id", "step", unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int]
    object_prefix: Mapped[str]
    manifest: Mapped[dict[str, Any]]
    metrics: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Artifact(Base):
    """What a job made for its user: one archive a kind (`adapter`, `model`)."""

    __tablename__ = "artifacts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    object_key: Mapped[str]
    bytes: Mapped[int]
    sha256: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Outbox(Base):
    """A message to send after the commit that wrote it; kept until what it nudges has happened."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    queue: Mapped[str]
    task: Mapped[str]
    args: Mapped[dict[str, Any]]
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    sent_at: Mapped[datetime | None]


class Sweep(Base):
    """One row: when the reconciler last ran, by which it sees that the database, or it itself, was away."""

    __tablename__ = "sweeps"

    id: Mapped[int] = mapped_column(primary_key=True)
    last_run_at: Mapped[datetime]
