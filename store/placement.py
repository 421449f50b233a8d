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

MAX_PLACED_AT_ONCE = 100


@dataclass
class Room:
    """What is free on one host."""

    host: Host
    gpus: list[int]
    cpu_slots: int
    has_gpus: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_gpus = bool(self.host.hardware["gpus"])

    def take(self, asked_gpus: int | None) -> list[int] | None:
        """The devices for a job and take them, or None where they are not free. None asks for one GPU where the host
        has any, else for its CPU; 0 asks for the CPU."""
        wanted = (1 if self.has_gpus else 0) if asked_gpus is None else asked_gpus
        if wanted:
            if len(self.gpus) < wanted:
                return None
            taken, self.gpus = self.gpus[:wanted], self.gpus[wanted:]
            return taken
        if not self.cpu_slots:
            return None
        self.cpu_slots -= 1
        return []


def place_jobs(session: Session) -> int:
    """Give queued jobs their hosts: highest priority first, then the oldest. Returns how many were placed."""
    session.execute(select(func.pg_advisory_xact_lock(LOCK)))
    rooms = _list_rooms(session)
    placed = 0
    for job in _list_queued(session):
        for room in rooms:
            devices = room.take(_asked_gpus(job))
            if devices is not None:
                _place(session, job, room.host, devices)
                placed += 1
                break
    return placed


def _list_rooms(session: Session) -> list[Room]:
    rooms = []
    open_attempts = list(session.scalars(select(Attempt).where(Attempt.status != AttemptStatus.ENDED)))
    for host in list_live_hosts(session):
        held = [attempt for attempt in open_attempts if attempt.host_name == host.name]
        busy = {index for attempt in held for index in attempt.gpus}
        free = [gpu["index"] for gpu in host.hardware["gpus"] if gpu["index"] not in busy]
        rooms.append(Room(host, free, max(0, host.cpu_slots - sum(not attempt.gpus for attempt in held))))
    return rooms


def _list_queued(session: Session) -> list[Job]:
    query = (
        select(Job)
        .where(Job.status == JobStatus.QUEUED, Job.desired_status.is_(None))
        .where(or_(Job.not_before.is_(None), Job.not_before <= func.clock_timestamp()))
        # A queued job whose last attempt is still open has just been placed and waits to be claimed.
        .where(~select(Attempt).where(Attempt.job_id == Job.id, Attempt.status != AttemptStatus.ENDED).exists())
        .order_by(Job.priority.desc(), Job.created_at)
        .limit(MAX_PLACED_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    return list(session.scalars(query))


def _asked_gpus(job: Job) -> int | None:
    asked = job.spec.get("resources", {}).get("gpus", "auto")
    return None if asked == "auto" else int(asked)


def _place(session: Session, job: Job, host: Host, devices: list[int]) -> None:
    job.attempt += 1
    session.add(Attempt(job_id=job.id, number=job.attempt, host_name=host.name, gpus=devices))
    session.flush()
    message = {"job_id": job.id, "attempt": job.attempt}
    append_message(session, host_queue(host.name), START_ATTEMPT, message, job_id=job.id, attempt=job.attempt)
