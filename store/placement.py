"""Which host and which devices a queued job gets. One transaction at a time decides."""

from dataclasses import dataclass, field

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from store.hosts import list_live_hosts
from store.models import Attempt, Host, Job
from store.outbox import START_ATTEMPT, append_message, host_queue
from store.status import AttemptStatus, JobStatus

LOCK = 7_206_002
"""Advisory lock of placement."""


@dataclass
class Room:
    """What is free on one host."""

    host: Host
    gpus: list[int]
    cpu_slots: int
    has_gpus: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_gpus = bool(self.host.hardware["gpus"])

    @property
    def is_full(self) -> bool:
        return not self.gpus and not self.cpu_slots

    def fits(self, asked_gpus: int | None) -> bool:
        wanted = self._gpus_for(asked_gpus)
        return len(self.gpus) >= wanted if wanted else self.cpu_slots > 0

    def take(self, asked_gpus: int | None) -> list[int]:
        """Take the devices of a job that fits; their indexes, none on the CPU."""
        wanted = self._gpus_for(asked_gpus)
        if not wanted:
            self.cpu_slots -= 1
        taken, self.gpus = self.gpus[:wanted], self.gpus[wanted:]
        return taken

    def _gpus_for(self, asked: int | None) -> int:
        """None asks for one GPU where the host has any, else for its CPU; 0 asks for the CPU."""
        return int(self.has_gpus) if asked is None else asked


def place_jobs(session: Session) -> int:
    """Give queued jobs their hosts: highest priority first, then the oldest. A job that does not fit is passed by those
    that do. Returns how many were placed."""
    session.execute(select(func.pg_advisory_xact_lock(LOCK)))
    rooms = _list_rooms(session)
    placed = 0
    for job_id, asked_gpus in _list_queued(session):
        if all(room.is_full for room in rooms):
            break
        fitting = next((room for room in rooms if room.fits(asked_gpus)), None)
        if fitting is not None and (job := _lock_queued(session, job_id)) is not None:
            _place(session, job, fitting.host, fitting.take(asked_gpus))
            placed += 1
    return placed


def can_ever_hold(session: Session, asked_gpus: int | None) -> bool:
    """Whether a live host has what a job asks for, be it free or not."""
    hosts = list_live_hosts(session)
    return any(Room(host, list(range(len(host.hardware["gpus"]))), host.cpu_slots).fits(asked_gpus) for host in hosts)


def _list_rooms(session: Session) -> list[Room]:
    rooms = []
    open_attempts = list(session.scalars(select(Attempt).where(Attempt.status != AttemptStatus.ENDED)))
    for host in list_live_hosts(session):
        held = [attempt for attempt in open_attempts if attempt.host_name == host.name]
        busy = {index for attempt in held for index in attempt.gpus}
        free = [gpu["index"] for gpu in host.hardware["gpus"] if gpu["index"] not in busy]
        rooms.append(Room(host, free, max(0, host.cpu_slots - sum(not attempt.gpus for attempt in held))))
    return rooms


def _list_queued(session: Session) -> list[tuple[str, int | None]]:
    """Id and asked GPUs of the jobs that may be placed, in their order."""
    asked = Job.spec["resources"]["gpus"].astext
    query = (
        select(Job.id, asked)
        .where(Job.status == JobStatus.QUEUED, Job.desired_status.is_(None))
        .where(or_(Job.not_before.is_(None), Job.not_before <= func.clock_timestamp()))
        # A queued job whose last attempt is still open has just been placed and waits to be claimed.
        .where(~select(Attempt).where(Attempt.job_id == Job.id, Attempt.status != AttemptStatus.ENDED).exists())
        .order_by(Job.priority.desc(), Job.created_at)
    )
    return [(job_id, None if gpus in (None, "auto") else int(gpus)) for job_id, gpus in session.execute(query)]


def _lock_queued(session: Session, job_id: str) -> Job | None:
    """The row, unless somebody else holds it, such as to cancel it, or it is not queued any more."""
    job = session.get(Job, job_id, with_for_update={"skip_locked": True}, populate_existing=True)
    return job if job is not None and job.status == JobStatus.QUEUED else None


def _place(session: Session, job: Job, host: Host, devices: list[int]) -> None:
    job.attempt += 1
    session.add(Attempt(job_id=job.id, number=job.attempt, host_name=host.name, gpus=devices))
    session.flush()
    message = {"job_id": job.id, "attempt": job.attempt}
    append_message(session, host_queue(host.name), START_ATTEMPT, message, job_id=job.id, attempt=job.attempt)
