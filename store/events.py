"""What is told about a job, and the one place where its status changes."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store.errors import ConflictError, InvalidRequestError
from store.models import Event, Job
from store.pages import Page, read_page
from store.session import storable
from store.status import ALLOWED_MOVES, JobStatus

PREFIX = "ftevent-"


def switch_status(session: Session, job: Job, to: JobStatus, message: str, *, level: str = "info") -> None:
    """Move a job, which the caller holds locked, along `ALLOWED_MOVES` and write the event of it.

    Raises:
        ConflictError: the move is not in the table.
    """
    if to not in ALLOWED_MOVES[job.status]:
        raise ConflictError(f"job {job.id} is {job.status.value}; it cannot become {to.value}")
    job.status = to
    if to.is_final:
        job.finished_at = session.scalar(select(func.clock_timestamp()))
        job.desired_status = None
    append_event(session, job, message, level=level, data={"status": to.value})


def append_event(
    session: Session,
    job: Job,
    message: str,
    *,
    level: str = "info",
    type: str = "message",
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    told = storable(message)
    session.add(Event(job_id=job.id, attempt=job.attempt, level=level, type=type, message=told, step=step, data=data))


def list_events(session: Session, job_id: str, *, after: str | None, limit: int) -> Page[Event]:
    """Newest first."""
    query = select(Event).where(Event.job_id == job_id).order_by(Event.id.desc())
    if after is not None:
        query = query.where(Event.id < _cursor(session, job_id, after))
    return read_page(session, query, limit)


def _cursor(session: Session, job_id: str, after: str) -> int:
    """The id behind a cursor. The event itself may be gone: those of steps that are made anew are."""
    number = after.removeprefix(PREFIX)
    if number.isascii() and number.isdigit() and len(number) <= 18:
        bounds = select(func.min(Event.id), func.max(Event.id)).where(Event.job_id == job_id)
        first, last = session.execute(bounds).one()
        if first is not None and first <= int(number) <= last:
            return int(number)
    raise InvalidRequestError(f"after: no event {after!r} of this job", param="after")
