"""Events of a run become rows: each once, in order, and only those of the current attempt."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store import models
from store.attempts import lock_current
from store.errors import InvalidRequestError
from store.events import append_event
from store.models import Artifact, Attempt, Checkpoint, Job, Metric
from store.pages import Page, read_page
from store.starts import list_waited_for
from store.status import JobStatus
from training.events import Event
from training.retention import choose_expired, find_needed


def store_events(session: Session, job_id: str, number: int, events: Sequence[Event]) -> JobStatus | None:
    """Store what is newer than the last stored `seq`: to send the same events again changes nothing. Returns what is
    wished for the job.

    Raises:
        FencedError: the attempt is not the current one any more.
    """
    job, attempt = lock_current(session, job_id, number)
    points = Points(job_id)
    oldest = _oldest_taken_over(session, attempt)
    for event in events:
        if event.seq > attempt.last_seq and event.attempt >= oldest:
            _store_event(session, job, attempt, event, points)
        attempt.last_seq = max(attempt.last_seq, event.seq)
    points.store(session)
    return job.desired_status


class Points:
    """Values of steps on their way into one statement. Those of one step are merged: evaluation comes after the step's
    own numbers."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._rows: dict[int, dict[str, Any]] = {}

    def add(self, event: Event) -> None:
        earlier = self._rows.get(event.step, {"data": {}})
        at = earlier.get("at") or datetime.fromtimestamp(event.at, UTC)
        about = {"job_id": self._job_id, "step": event.step, "attempt": event.attempt, "at": at}
        self._rows[event.step] = {**about, "data": {**earlier["data"], **event.data}}

    def store(self, session: Session) -> None:
        if not self._rows:
            return
        statement = insert(Metric).values(list(self._rows.values()))
        merged = {"data": Metric.data.op("||")(statement.excluded.data), "attempt": statement.excluded.attempt}
        session.execute(statement.on_conflict_do_update(index_elements=[Metric.job_id, Metric.step], set_=merged))
        self._rows = {}


def _oldest_taken_over(session: Session, attempt: Attempt) -> int:
    """The oldest attempt whose late events count: those before this one without another host between. What a host did
    not get rid of before another one went on has been made anew there."""
    query = select(Attempt).where(Attempt.job_id == attempt.job_id, Attempt.number < attempt.number)
    oldest = attempt.number
    for earlier in session.scalars(query.where(Attempt.claimed_at.is_not(None)).order_by(Attempt.number.desc())):
        if earlier.host_name != attempt.host_name:
            break
        oldest = earlier.number
    return oldest


def tell(session: Session, job_id: str, number: int, message: str) -> None:
    """A warning of the supervisor itself."""
    job, _ = lock_current(session, job_id, number)
    append_event(session, job, message, level="warn")


def is_stored(session: Session, job_id: str, step: int, manifest: dict[str, Any]) -> bool:
    """Whether this very checkpoint is in the object store."""
    query = select(Checkpoint.manifest).where(Checkpoint.job_id == job_id, Checkpoint.step == step)
    return session.scalar(query) == manifest


def forget_events(session: Session, job_id: str, number: int) -> None:
    """The run directory was made anew, so its `seq` begins at 1 again."""
    _, attempt = lock_current(session, job_id, number)
    attempt.last_seq = 0


def add_checkpoint(
    session: Session,
    job_id: str,
    number: int,
    step: int,
    prefix: str,
    manifest: dict[str, Any],
    metrics: dict[str, Any],
) -> None:
    """Make a checkpoint exist whose files are all in the object store; the same step again replaces it."""
    job, _ = lock_current(session, job_id, number)
    values = {"attempt": number, "object_prefix": prefix, "manifest": manifest, "metrics": metrics}
    statement = insert(Checkpoint).values(
        id=f"ftckpt-{job_id.removeprefix('ftjob-')}-{step}", job_id=job_id, step=step, **values
    )
    session.execute(statement.on_conflict_do_update(index_elements=[Checkpoint.job_id, Checkpoint.step], set_=values))
    append_event(session, job, f"New checkpoint created: step {step}", step=step)


def expire_checkpoints(session: Session, job_id: str, number: int) -> list[str]:
    """Delete the rows of checkpoints beyond the plan's `save_total_limit`; the object prefixes of those that are left.
    The bytes go once this is committed: a row always has its bytes."""
    job, _ = lock_current(session, job_id, number)
    query = select(Checkpoint).where(Checkpoint.job_id == job_id).with_for_update()
    rows = {row.step: row for row in session.scalars(query)}
    # The plan of an older version has no limit.
    limit = (job.plan or {}).get("save_total_limit", len(rows))
    needed = find_needed(rows[max(rows)].manifest.get("progress", {})) if rows else set()
    waited_for = list_waited_for(session, [row.id for row in rows.values()])
    needed |= {step for step, row in rows.items() if row.id in waited_for}
    for step in choose_expired({step: row.metrics.get("eval_loss") for step, row in rows.items()}, limit, needed):
        session.delete(rows.pop(step))
    return [row.object_prefix for row in rows.values()]


def add_artifact(session: Session, job_id: str, number: int, kind: str, key: str, size_bytes: int, sha256: str) -> None:
    lock_current(session, job_id, number)
    values = {"attempt": number, "object_key": key, "bytes": size_bytes, "sha256": sha256}
    statement = insert(Artifact).values(job_id=job_id, kind=kind, **values)
    session.execute(statement.on_conflict_do_update(index_elements=[Artifact.job_id, Artifact.kind], set_=values))


def list_checkpoints(session: Session, job_id: str, *, after: str | None, limit: int) -> Page[Checkpoint]:
    """Newest step first."""
    query = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step.desc())
    if after is not None:
        step = session.scalar(select(Checkpoint.step).where(Checkpoint.id == after, Checkpoint.job_id == job_id))
        if step is None:
            raise InvalidRequestError(f"after: no checkpoint {after!r} of this job", param="after")
        query = query.where(Checkpoint.step < step)
    return read_page(session, query, limit)


def find_artifact(session: Session, job_id: str, kind: str) -> Artifact | None:
    return session.get(Artifact, (job_id, kind))


def _store_event(session: Session, job: Job, attempt: Attempt, event: Event, points: Points) -> None:
    match event.type:
        case "started" if event.attempt == attempt.number:
            points.store(session)
            _tell_start(session, job, attempt, event)
        case "plan":
            job.plan = event.data
        case "metrics" | "evaluated":
            points.add(event)
            _tell_metrics(session, job, event)
        case "early_stopped":
            append_event(session, job, event.data["message"], step=event.step, data=event.data)
        case "warning":
            append_event(session, job, event.data["message"], level="warn", step=event.step, data=event.data)
            if (step := event.data.get("rolled_back_to")) is not None:
                points.store(session)
                _forget_steps(session, job, step)


def _tell_start(session: Session, job: Job, attempt: Attempt, event: Event) -> None:
    resumed_from = event.data.get("resumed_from")
    attempt.resumed_from = resumed_from
    _forget_steps(session, job, resumed_from or 0)
    where = f"Training on {event.data['device']}"
    append_event(session, job, where if resumed_from is None else f"{where}, resumed from step {resumed_from}")


def _forget_steps(session: Session, job: Job, last: int) -> None:
    """A run that goes on from a checkpoint makes the later steps anew: what was told of them goes, so that each step
    stands in the curve once."""
    session.execute(delete(Metric).where(Metric.job_id == job.id, Metric.step > last))
    session.execute(delete(Checkpoint).where(Checkpoint.job_id == job.id, Checkpoint.step > last))
    stale = (models.Event.job_id == job.id, models.Event.type == "metrics", models.Event.step > last)
    session.execute(delete(models.Event).where(*stale))


def _tell_metrics(session: Session, job: Job, event: Event) -> None:
    name = "training loss" if event.type == "metrics" else "validation loss"
    loss = event.data.get("train_loss" if event.type == "metrics" else "eval_loss")
    total = f"/{job.plan['steps']}" if job.plan else ""
    told = f"{loss:.4f}" if loss is not None else "not finite"
    data = {"step": event.step, **event.data}
    append_event(session, job, f"Step {event.step}{total}: {name}={told}", type="metrics", step=event.step, data=data)
