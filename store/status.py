"""The states of jobs and attempts and the moves between them; docs/states.md draws them."""

from enum import StrEnum


class JobStatus(StrEnum):
    VALIDATING_FILES = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not ALLOWED_MOVES[self]


ALLOWED_MOVES: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING_FILES: frozenset({JobStatus.QUEUED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.FAILED, JobStatus.CANCELLED}),
    # Back to queued when an attempt was lost and another may follow.
    JobStatus.RUNNING: frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.QUEUED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}


class AttemptStatus(StrEnum):
    PLACED = "placed"
    "A host and its devices are reserved; nothing has started."
    RUNNING = "running"
    "Claimed by its host, under a lease."
    ENDED = "ended"


class EndReason(StrEnum):
    """Why an attempt ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    "The run said why: data, config, capacity or a bug."
    TRAINER_DIED = "trainer_died"
    "The trainer ended without a word, such as by a signal."
    HOST_FAULT = "host_fault"
    "The host could not do its part, such as for want of disk."
    STOPPED = "stopped"
    "The host was asked to let go of it; the next attempt goes on from the checkpoint."
    LEASE_EXPIRED = "lease_expired"
    "Neither host nor supervisor was heard of."
    HOST_LOST = "host_lost"
    "The host went silent before it started anything."

    @property
    def is_infrastructure(self) -> bool:
        """Whether the next attempt counts against max_attempts as a fault of the infrastructure."""
        return self in (EndReason.TRAINER_DIED, EndReason.HOST_FAULT, EndReason.LEASE_EXPIRED)
