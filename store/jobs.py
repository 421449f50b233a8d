"""Jobs as their users see them: made, listed, cancelled."""

import hashlib
import json
import secrets
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import Select, func, select, tuple_
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from store.errors import ConflictError, InvalidRequestError, NotFoundError
from store.events import append_event, switch_status
from store.models import Attempt, File, Job
from store.outbox import CONTROL_QUEUE, PLACE_JOBS, append_message
from store.pages import Page, read_page
from store.placement import can_ever_hold
from store.starts import check_start
from store.status import AttemptStatus, JobStatus
from training.rows import find_misuse
from training.spec import MAX_SEED, JobSpec

RETRY_WINDOW = timedelta(minutes=10)
"""A client that repeats a create call within this time, and says so, means the same job."""


def create_job(session: Session, project_id: str, spec: JobSpec, *, idempotency_key: str | None, is_retry: bool) -> Job:
    """A new job, queued; or the one that the same call made before.

    Raises:
        InvalidRequestError: a file is missing, is not for training, has row errors, or rows of another method; or what
            the job is to start from is missing or does not fit.
        ConflictError: the idempotency key was used for another body.
    """
    asked = spec.asked()
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    if earlier := _find_same_call(session, project_id, digest, idempotency_key, is_retry):
        return earlier
    if spec.resources.nodes > 1:
        message = (
            "resources.nodes: this version places a job on one host; leave it out, or start the engine on each host"
        )
        raise InvalidRequestError(message, param="resources.nodes", code="not_offered")
    _check_file(session, project_id, spec, spec.training_file, "training_file")
    if spec.validation_file is not None:
        _check_file(session, project_id, spec, spec.validation_file, "validation_file")
    check_start(session, project_id, spec)
    job = Job(
        id=f"ftjob-{secrets.token_hex(12)}",
        project_id=project_id,
        spec=asked,
        spec_digest=digest,
        idempotency_key=idempotency_key,
        seed=spec.seed if spec.seed is not None else secrets.randbelow(MAX_SEED + 1),
        model=spec.model,
        training_file=spec.training_file,
        validation_file=spec.validation_file,
        priority=spec.resources.priority,
        status=JobStatus.VALIDATING_FILES,
        attempt=0,
    )
    session.add(job)
    session.flush()
    append_event(session, job, f"Created fine-tuning job: {job.id}")
    append_event(session, job, f"Validating training file: {job.training_file}")
    # The rows were read when the file was uploaded; what depends on the model's tokens is found by the run itself,
    # before its first step.
    switch_status(session, job, JobStatus.QUEUED, "Files validated, moving job to queued state")
    append_message(session, CONTROL_QUEUE, PLACE_JOBS, {})
    _tell_if_no_host_fits(session, job, spec.resources.gpus)
    return job


def get_job(session: Session, project_id: str, job_id: str) -> Job:
    job = session.scalar(select(Job).where(Job.id == job_id, Job.project_id == project_id))
    if job is None:
        raise NotFoundError(f"no fine-tuning job {job_id!r}", code="job_not_found")
    return job


def list_jobs(
    session: Session, project_id: str, *, after: str | None, limit: int, metadata: dict[str, str] | None = None
) -> Page[Job]:
    """Newest first; `metadata` holds pairs that a job's own has to contain."""
    query = select(Job).where(Job.project_id == project_id).order_by(Job.created_at.desc(), Job.id.desc())
    if metadata:
        query = query.where(Job.spec["metadata"].cast(JSONB).contains(metadata))
    if after is not None:
        query = _after(session, query, project_id, after)
    return read_page(session, query, limit)


def cancel_job(session: Session, project_id: str, job_id: str) -> Job:
    """Cancel at once what has not started; of a running job the wish is noted, and its supervisor ends it.

    Raises:
        ConflictError: the job has ended otherwise. To cancel a cancelled job again changes nothing.
    """
    get_job(session, project_id, job_id)
    job = session.get_one(Job, job_id, with_for_update=True, populate_existing=True)
    if job.status == JobStatus.CANCELLED or job.desired_status == JobStatus.CANCELLED:
        return job
    if job.status.is_final:
        raise ConflictError(
            f"job {job.id} has already {job.status.value}; it cannot be cancelled", code="job_has_ended"
        )
    attempt = session.get(Attempt, (job.id, job.attempt), with_for_update=True, populate_existing=True)
    if attempt is not None and attempt.status == AttemptStatus.RUNNING:
        job.desired_status = JobStatus.CANCELLED
        append_event(session, job, "Cancelling: the run is being stopped")
        return job
    if attempt is not None and attempt.status == AttemptStatus.PLACED:
        attempt.status = AttemptStatus.ENDED
        attempt.end_reason = "cancelled"
        attempt.ended_at = session.scalar(select(func.clock_timestamp()))
    switch_status(session, job, JobStatus.CANCELLED, "The job was cancelled before it started")
    return job


def _find_same_call(
    session: Session, project_id: str, digest: str, idempotency_key: str | None, is_retry: bool
) -> Job | None:
    if idempotency_key is not None:
        # Calls with one key wait for each other, so that two at once make one job.
        session.execute(select(func.pg_advisory_xact_lock(_lock_id(project_id, idempotency_key))))
        earlier = session.scalar(
            select(Job).where(Job.project_id == project_id, Job.idempotency_key == idempotency_key)
        )
        if earlier is not None and earlier.spec_digest != digest:
            raise ConflictError(
                f"this Idempotency-Key already made {earlier.id}, from another body; use a new key",
                code="idempotency_key_reused",
            )
        return earlier
    if not is_retry:
        return None
    session.execute(select(func.pg_advisory_xact_lock(_lock_id(project_id, digest))))
    same = select(Job).where(
        Job.project_id == project_id, Job.spec_digest == digest, Job.created_at > func.now() - RETRY_WINDOW
    )
    return session.scalar(same.order_by(Job.created_at.desc()).limit(1))


def _lock_id(*words: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "big", signed=True)


def _check_file(session: Session, project_id: str, spec: JobSpec, file_id: str, param: str) -> None:
    # Locked, so that it is not deleted between this check and the commit.
    query = select(File).where(File.id == file_id, File.project_id == project_id).with_for_update(read=True)
    file = session.scalar(query)
    if file is None:
        raise InvalidRequestError(f"{param}: no file {file_id!r}", param=param, code="file_not_found")
    if file.purpose != "fine-tune":
        message = f'{param}: {file_id} was uploaded with purpose "{file.purpose}"; "fine-tune" is needed'
        raise InvalidRequestError(message, param=param, code="wrong_purpose")
    report: dict[str, Any] = file.report or {}
    if errors := report.get("errors"):
        first, count = errors[0], report.get("error_count", len(errors))
        more = f" ({count} row errors in all: GET /v1/files/{file_id}/report)" if count > 1 else ""
        raise InvalidRequestError(f"{_place(first)}{first['message']}{more}", param=param, code=first["code"])
    if misuse := find_misuse(spec.method.type, report):
        where = f"{param}: {file_id}: " if misuse.line == 0 else ""
        told = misuse.message if misuse.line == 0 else str(misuse)
        raise InvalidRequestError(where + told, param=param, code=misuse.code)


def _tell_if_no_host_fits(session: Session, job: Job, gpus: int | Literal["auto"]) -> None:
    """A job that nothing can run now waits; whoever made it is told so at once."""
    if can_ever_hold(session, None if gpus == "auto" else gpus):
        return
    wanted = f"with {gpus} GPU(s)" if gpus not in ("auto", 0) else "of the service"
    remedy = "; resources.gpus 0 asks for a CPU" if gpus not in ("auto", 0) else ""
    message = f"No host {wanted} is up; the job waits until one comes{remedy}"
    append_event(session, job, message, level="warn", data={"code": "no_such_host"})


def _place(issue: dict[str, Any]) -> str:
    where = f"line {issue['line']}" if issue["line"] else ""
    where += f", {issue['path']}" if issue["path"] else ""
    return f"{where}: " if where and not issue["message"].startswith("line ") else ""


def _after(session: Session, query: Select[Any], project_id: str, after: str) -> Select[Any]:
    cursor = session.scalar(select(Job).where(Job.id == after, Job.project_id == project_id))
    if cursor is None:
        raise InvalidRequestError(f"after: no fine-tuning job {after!r}", param="after")
    return query.where(tuple_(Job.created_at, Job.id) < (cursor.created_at, cursor.id))
