"""Attempts: claimed once, trusted under a lease, ended once. Every write of a worker goes through `lock_current`."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from store.errors import FencedError
from store.events import append_event, switch_status
from store.models import Attempt, Checkpoint, File, Job, Project
from store.outbox import CONTROL_QUEUE, PLACE_JOBS, append_message
from store.settings import get_settings
from store.starts import find_start
from store.status import AttemptStatus, EndReason, JobStatus

MAX_BACKOFF_S = 60


@dataclass(frozen=True)
class RunInput:
    """All that a supervisor needs to start an attempt."""

    spec: dict[str, Any]
    "As asked, with the seed filled in."
    gpus: list[int]
    last_seq: int
    files: dict[str, tuple[str, str]]
    "training_file, validation_file -> object key, sha256."
    checkpoints: list[tuple[int, str, dict[str, Any]]]
    "Step, object prefix, manifest; newest first."
    start: dict[str, tuple[str, str]] = field(default_factory=dict)
    "The weights of `resume_from`: path -> object key, sha256."


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; `error` is the failed event's, `stop_s` the seconds until no process was left."""

    reason: EndReason
    message: str
    error: dict[str, Any] | None = None
    exit_code: int | None = None
    stop_s: float | None = None
    trained_tokens: int | None = None


def claim_attempt(session: Session, job_id: str, number: int, host_name: str) -> bool:
    """Compare and swap: True for exactly one caller, who then has to start the supervisor; the job is running from now
    on. Copies of a message, and messages of jobs that were cancelled or placed elsewhere, get False."""
    job = _lock_job(session, job_id)
    attempt = session.get(Attempt, (job_id, number), with_for_update=True, populate_existing=True)
    if job is None or attempt is None or job.attempt != number or job.status != JobStatus.QUEUED:
        return False
    if attempt.status != AttemptStatus.PLACED or attempt.host_name != host_name:
        return False
    now = session.scalar(select(func.clock_timestamp()))
    attempt.last_seq = _last_seq_on(session, job_id, host_name)
    attempt.status = AttemptStatus.RUNNING
    attempt.claimed_at = now
    attempt.lease_expires_at = now + _lease() if now else None
    message = "Fine-tuning job started" if number == 1 else f"Fine-tuning job started again, attempt {number}"
    switch_status(session, job, JobStatus.RUNNING, f"{message}, on {host_name}")
    return True


def load_run(session: Session, job_id: str, number: int) -> RunInput:
    job, attempt = lock_current(session, job_id, number)
    asked = {"training_file": job.training_file, "validation_file": job.validation_file}
    files = {name: session.get_one(File, file_id) for name, file_id in asked.items() if file_id is not None}
    query = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step.desc())
    asked_start = job.spec.get("resume_from")
    return RunInput(
        spec={**job.spec, "seed": job.seed},
        gpus=list(attempt.gpus),
        last_seq=attempt.last_seq,
        files={name: (file.object_key, file.sha256) for name, file in files.items()},
        checkpoints=[(c.step, c.object_prefix, c.manifest) for c in session.scalars(query)],
        start=find_start(session, job.project_id, asked_start).files if asked_start else {},
    )


def renew_lease(session: Session, job_id: str, number: int) -> JobStatus | None:
    """Renew, and read what is wished for the job.

    Raises:
        FencedError: the attempt is not the current one any more.
    """
    wish = session.execute(select(Job.desired_status, Job.attempt).where(Job.id == job_id)).one_or_none()
    running = (Attempt.job_id == job_id, Attempt.number == number, Attempt.status == AttemptStatus.RUNNING)
    renewed = session.scalar(
        update(Attempt)
        .where(*running)
        .values(lease_expires_at=func.clock_timestamp() + _lease())
        .returning(Attempt.number)
    )
    if renewed is None or wish is None or wish.attempt != number:
        raise FencedError(f"attempt {number} of {job_id} is not the current one")
    desired: JobStatus | None = wish.desired_status
    return desired


def end_attempt(session: Session, job_id: str, number: int, outcome: Outcome) -> JobStatus:
    """End the attempt and move the job on: to its end, or back into the queue for the next attempt.

    Raises:
        FencedError: the attempt is not the current one any more.
    """
    job, attempt = lock_current(session, job_id, number)
    return close_attempt(session, job, attempt, outcome)


def close_attempt(session: Session, job: Job, attempt: Attempt, outcome: Outcome) -> JobStatus:
    """`end_attempt` on rows that the caller holds locked."""
    attempt.status = AttemptStatus.ENDED
    attempt.ended_at = session.scalar(select(func.clock_timestamp()))
    attempt.end_reason = outcome.reason.value
    attempt.exit_code = outcome.exit_code
    attempt.stop_s = outcome.stop_s
    session.flush()
    if job.desired_status == JobStatus.CANCELLED:
        # The wish was accepted, so it holds, also where the run was done in the same moment.
        switch_status(session, job, JobStatus.CANCELLED, "The job was cancelled")
    elif outcome.reason == EndReason.FINISHED:
        job.fine_tuned_model = _model_name(session, job)
        job.trained_tokens = outcome.trained_tokens
        message = "The job has successfully completed"
        switch_status(session, job, JobStatus.SUCCEEDED, f"{message}: {job.fine_tuned_model}")
    elif outcome.reason == EndReason.FAILED:
        job.error = outcome.error
        switch_status(session, job, JobStatus.FAILED, outcome.message, level="error")
    else:
        _try_again(session, job, outcome)
    append_message(session, CONTROL_QUEUE, PLACE_JOBS, {})  # devices are free now
    return job.status


def _try_again(session: Session, job: Job, outcome: Outcome) -> None:
    lost = _count_lost(session, job.id)
    allowed = int(job.spec.get("resources", {}).get("max_attempts", 3))
    if outcome.reason.is_infrastructure and lost >= allowed:
        job.error = {
            "code": "attempts_exhausted",
            "message": f"{outcome.message}; {lost} attempts were lost so. See the hosts' logs, then submit again",
            "param": None,
            "fault": "infrastructure",
            "retryable": True,
        }
        switch_status(session, job, JobStatus.FAILED, job.error["message"], level="error")
        return
    wait_s = min(2 ** (lost - 1), MAX_BACKOFF_S) if outcome.reason.is_infrastructure else 0
    job.not_before = session.scalar(select(func.clock_timestamp() + timedelta(seconds=wait_s)))
    message = f"{outcome.message}; the job goes on from its last checkpoint"
    if job.status == JobStatus.QUEUED:  # it was placed, but had not started
        append_event(session, job, message, level="warn")
    else:
        switch_status(session, job, JobStatus.QUEUED, message, level="warn")


def list_running_on(session: Session, host_name: str) -> list[tuple[str, int]]:
    """Job and number of the attempts that this host has claimed and not ended."""
    query = select(Attempt.job_id, Attempt.number).where(
        Attempt.host_name == host_name, Attempt.status == AttemptStatus.RUNNING
    )
    return [(job_id, number) for job_id, number in session.execute(query)]


def lock_current(session: Session, job_id: str, number: int) -> tuple[Job, Attempt]:
    """The rows of a job and its running attempt, locked in the order that all follow: job, then attempt.

    Raises:
        FencedError: the attempt is not the current one any more.
    """
    job = _lock_job(session, job_id)
    attempt = session.get(Attempt, (job_id, number), with_for_update=True, populate_existing=True)
    if job is None or attempt is None or job.attempt != number or attempt.status != AttemptStatus.RUNNING:
        raise FencedError(f"attempt {number} of {job_id} is not the current one")
    return job, attempt


def _lock_job(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id, with_for_update=True, populate_existing=True)


def _lease() -> timedelta:
    return timedelta(seconds=get_settings().lease_s)


def _last_seq_on(session: Session, job_id: str, host_name: str) -> int:
    """Attempts of one job on one host share a run directory, and so its sequence of events."""
    here = select(Attempt.last_seq).where(Attempt.job_id == job_id, Attempt.host_name == host_name)
    # Of the newest one that began: where the run directory was lost since an older one, the numbers began anew.
    began = here.where(Attempt.claimed_at.is_not(None)).order_by(Attempt.number.desc())
    return session.scalar(began.limit(1)) or 0


def _count_lost(session: Session, job_id: str) -> int:
    reasons = [reason.value for reason in EndReason if reason.is_infrastructure]
    query = select(func.count()).where(Attempt.job_id == job_id, Attempt.end_reason.in_(reasons))
    return session.scalar(query) or 0


def _model_name(session: Session, job: Job) -> str:
    """`ft:<base>:<project>:<suffix>:<id>`; no slash, since the name stands in URLs."""
    project = session.get_one(Project, job.project_id)
    base = job.model.replace("/", "--")
    return f"ft:{base}:{project.name}:{job.spec.get('suffix') or ''}:{job.id.removeprefix('ftjob-')}"
