"""Repairs what was lost: expired leases, hosts that went silent. Only one reconciler works at a time."""

from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.attempts import Outcome, close_attempt
from store.models import Attempt, Host, Job, Sweep
from store.placement import place_jobs
from store.settings import get_settings
from store.status import AttemptStatus, EndReason

LOCK = 7_206_003
"""Advisory lock of the reconciler."""


def reconcile(session: Session) -> None:
    """One round. Another that runs at the same time makes this one a no-op."""
    if not session.scalar(select(func.pg_try_advisory_xact_lock(LOCK))):
        return
    if _was_away(session):
        # Nobody could renew while the database was away: that is no sign of death.
        lease = timedelta(seconds=get_settings().lease_s)
        running = Attempt.status == AttemptStatus.RUNNING
        session.execute(update(Attempt).where(running).values(lease_expires_at=func.clock_timestamp() + lease))
    else:
        _end_expired(session)
        _end_unclaimed(session)
    place_jobs(session)


def _was_away(session: Session) -> bool:
    """Whether the last round is so long ago that leases may have run out unseen; notes this round's time."""
    last: datetime | None = session.scalar(select(Sweep.last_run_at))
    now = session.scalar(select(func.clock_timestamp()))
    statement = insert(Sweep).values(id=1, last_run_at=now)
    session.execute(statement.on_conflict_do_update(index_elements=[Sweep.id], set_={"last_run_at": now}))
    settings = get_settings()
    limit = timedelta(seconds=max(settings.lease_s / 3, 3 * settings.sweep_s))
    return last is None or now is None or now - last > limit


def _end_expired(session: Session) -> None:
    expired = (Attempt.status == AttemptStatus.RUNNING, Attempt.lease_expires_at < func.clock_timestamp())
    for job_id, number in session.execute(select(Attempt.job_id, Attempt.number).where(*expired)).all():
        message = "The host was not heard of any more"
        _close(session, job_id, number, AttemptStatus.RUNNING, Outcome(EndReason.LEASE_EXPIRED, message))


def _end_unclaimed(session: Session) -> None:
    silent = func.now() - timedelta(seconds=get_settings().host_timeout_s)
    query = (
        select(Attempt.job_id, Attempt.number)
        .join(Host, Host.name == Attempt.host_name)
        .where(Attempt.status == AttemptStatus.PLACED, Host.heartbeat_at < silent)
    )
    for job_id, number in session.execute(query).all():
        outcome = Outcome(EndReason.HOST_LOST, "The host went silent before it could start the job")
        _close(session, job_id, number, AttemptStatus.PLACED, outcome)


def _close(session: Session, job_id: str, number: int, status: AttemptStatus, outcome: Outcome) -> None:
    """End the attempt if it still is as it was seen, now that its rows are locked."""
    job = session.get_one(Job, job_id, with_for_update=True, populate_existing=True)
    attempt = session.get_one(Attempt, (job_id, number), with_for_update=True, populate_existing=True)
    now: datetime | None = session.scalar(select(func.clock_timestamp()))
    lease = attempt.lease_expires_at
    renewed = lease is not None and now is not None and lease > now
    if attempt.status == status and job.attempt == number and not renewed:
        close_attempt(session, job, attempt, outcome)
