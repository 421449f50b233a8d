"""Placement, claims, leases and fencing: what keeps a job from being lost or run twice."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from store.attempts import Outcome, claim_attempt, end_attempt, load_run, renew_lease
from store.errors import FencedError
from store.events import list_events
from store.jobs import cancel_job
from store.models import Attempt, Host, Job, Outbox, Sweep
from store.outbox import host_queue
from store.placement import place_jobs
from store.queue import get_celery, publish_outbox, sweep_outbox
from store.reconcile import reconcile
from store.runs import add_checkpoint, list_checkpoints, store_events
from store.session import open_session
from store.settings import Settings
from store.status import AttemptStatus, EndReason, JobStatus
from tests.rows import make_host, make_job
from training.events import Event

LOST = Outcome(EndReason.TRAINER_DIED, "The trainer was ended by SIGKILL")


def start_job(session: Session, **body: Any) -> Job:
    make_host(session)
    job = make_job(session, **body)
    place_jobs(session)
    assert claim_attempt(session, job.id, job.attempt, "alpha")
    return job


def get_job_row(session: Session, job_id: str) -> Job:
    return session.get_one(Job, job_id, populate_existing=True)


def expire_lease(session: Session, job_id: str) -> None:
    past = func.now() - timedelta(seconds=1)
    session.execute(update(Attempt).where(Attempt.job_id == job_id).values(lease_expires_at=past))


# ---- placement


def test_higher_priority_goes_first_then_the_older(database: Settings) -> None:
    with open_session() as session:
        make_host(session, cpu_slots=2)
        old, young, urgent = make_job(session), make_job(session), make_job(session, resources={"priority": 5})
        assert place_jobs(session) == 2
        placed = set(session.scalars(select(Attempt.job_id)))
        assert placed == {urgent.id, old.id}
        assert place_jobs(session) == 0, "no room is left, and what is placed is not placed again"
        assert get_job_row(session, young.id).attempt == 0


def test_a_gpu_is_given_once_and_given_again_when_it_is_free(database: Settings) -> None:
    with open_session() as session:
        make_host(session, gpus=2, cpu_slots=1)
        jobs = [make_job(session) for _ in range(3)]
        on_cpu = make_job(session, resources={"gpus": 0})
        assert place_jobs(session) == 3
        held = {a.job_id: a.gpus for a in session.scalars(select(Attempt))}
        assert held == {jobs[0].id: [0], jobs[1].id: [1], on_cpu.id: []}
        assert claim_attempt(session, jobs[1].id, 1, "alpha")
        end_attempt(session, jobs[1].id, 1, Outcome(EndReason.FINISHED, "finished"))
        assert place_jobs(session) == 1
        assert session.get_one(Attempt, (jobs[2].id, 1)).gpus == [1]


def test_jobs_that_fit_nowhere_hold_up_no_other_and_are_told(database: Settings) -> None:
    with open_session() as session:
        make_host(session, cpu_slots=2)
        waiting = [make_job(session, resources={"gpus": 1}) for _ in range(120)]
        fitting = make_job(session)
        assert place_jobs(session) == 1
        assert session.scalars(select(Attempt.job_id)).all() == [fitting.id]
        told = [event.data for event in list_events(session, waiting[0].id, after=None, limit=9).items]
        assert {"code": "no_such_host"} in told
        make_host(session, "beta", gpus=1)
        assert place_jobs(session) == 1
        assert session.get_one(Attempt, (waiting[0].id, 1)).host_name == "beta"


def test_a_silent_host_gets_nothing(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        make_job(session)
        session.execute(update(Host).values(heartbeat_at=func.now() - timedelta(hours=1)))
        assert place_jobs(session) == 0


def test_placements_at_once_place_each_job_once(database: Settings) -> None:
    with open_session() as session:
        make_host(session, cpu_slots=10)
        for _ in range(10):
            make_job(session)

    def place(_: int) -> int:
        with open_session() as session:
            return place_jobs(session)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(place, range(8))) == 10


# ---- claims and fencing


def test_fifty_copies_of_a_message_claim_one_attempt(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        job = make_job(session)
        place_jobs(session)

    def claim(_: int) -> bool:
        with open_session() as session:
            return claim_attempt(session, job.id, 1, "alpha")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(claim, range(50))).count(True) == 1


def test_another_host_or_number_claims_nothing(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        job = make_job(session)
        place_jobs(session)
        assert not claim_attempt(session, job.id, 1, "beta")
        assert not claim_attempt(session, job.id, 2, "alpha")
        assert not claim_attempt(session, "ftjob-no", 1, "alpha")
        assert claim_attempt(session, job.id, 1, "alpha")


def test_every_write_of_an_older_attempt_is_refused(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        end_attempt(session, job.id, 1, LOST)
        session.execute(update(Job).values(not_before=None))
        place_jobs(session)
        assert claim_attempt(session, job.id, 2, "alpha")
        event = Event(1, 0.0, 1, "metrics", 1, {"train_loss": 1.0})
        for write in (
            lambda: store_events(session, job.id, 1, [event]),
            lambda: add_checkpoint(session, job.id, 1, 1, "p", {}, {}),
            lambda: renew_lease(session, job.id, 1),
            lambda: end_attempt(session, job.id, 1, LOST),
            lambda: load_run(session, job.id, 1),
        ):
            with pytest.raises(FencedError):
                write()
        assert renew_lease(session, job.id, 2) is None
        assert list_checkpoints(session, job.id, after=None, limit=9).items == []


# ---- ends


def test_infrastructure_tries_again_with_growing_pauses_up_to_the_limit(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session, resources={"max_attempts": 3})
        pauses = []
        for number in (1, 2):
            assert end_attempt(session, job.id, number, LOST) == JobStatus.QUEUED
            row = get_job_row(session, job.id)
            assert row.not_before is not None
            pauses.append((row.not_before - session.scalar(select(func.now()))).total_seconds())  # type: ignore[operator]
            assert place_jobs(session) == 0, "not before its pause is over"
            row.not_before = None
            assert place_jobs(session) == 1
            assert claim_attempt(session, job.id, number + 1, "alpha")
        assert pauses[1] > pauses[0] > 0
        assert end_attempt(session, job.id, 3, LOST) == JobStatus.FAILED
        error = get_job_row(session, job.id).error
        assert error is not None
        assert (error["code"], error["fault"], error["retryable"]) == ("attempts_exhausted", "infrastructure", True)


def test_a_stop_of_the_host_does_not_count_as_a_lost_attempt(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session, resources={"max_attempts": 1})
        stopped = Outcome(EndReason.STOPPED, "The host was asked to stop its runs")
        assert end_attempt(session, job.id, 1, stopped) == JobStatus.QUEUED
        assert place_jobs(session) == 1


def test_the_users_own_failure_is_final(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        error = {"code": "invalid_data", "message": "line 2: no", "fault": "data"}
        assert end_attempt(session, job.id, 1, Outcome(EndReason.FAILED, "line 2: no", error=error)) == JobStatus.FAILED
        assert get_job_row(session, job.id).error == error


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.FINISHED, EndReason.TRAINER_DIED, EndReason.FAILED])
def test_a_cancel_that_was_accepted_holds_whatever_happens_then(database: Settings, reason: EndReason) -> None:
    with open_session() as session:
        job = start_job(session)
        cancel_job(session, job.project_id, job.id)
        assert renew_lease(session, job.id, 1) == JobStatus.CANCELLED
        assert end_attempt(session, job.id, 1, Outcome(reason, "x", error={"code": "x"})) == JobStatus.CANCELLED
        row = get_job_row(session, job.id)
        assert (row.fine_tuned_model, row.error, row.desired_status) == (None, None, None)


def test_success_names_the_model_without_a_slash(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session, model="org/base", suffix="tone")
        outcome = Outcome(EndReason.FINISHED, "finished", trained_tokens=12)
        assert end_attempt(session, job.id, 1, outcome) == JobStatus.SUCCEEDED
        row = get_job_row(session, job.id)
        assert row.fine_tuned_model == f"ft:org--base:default:tone:{job.id.removeprefix('ftjob-')}"
        assert row.trained_tokens == 12


# ---- the reconciler


def test_an_expired_lease_brings_the_next_attempt(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        reconcile(session)
        expire_lease(session, job.id)
        reconcile(session)
        attempt = session.get_one(Attempt, (job.id, 1), populate_existing=True)
        assert (attempt.status, attempt.end_reason) == (AttemptStatus.ENDED, "lease_expired")
        assert get_job_row(session, job.id).status == JobStatus.QUEUED


def test_after_an_outage_every_lease_gets_its_full_length_again(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        reconcile(session)
        expire_lease(session, job.id)
        session.execute(update(Sweep).values(last_run_at=func.now() - timedelta(minutes=10)))
        reconcile(session)
        attempt = session.get_one(Attempt, (job.id, 1), populate_existing=True)
        assert attempt.status == AttemptStatus.RUNNING
        assert attempt.lease_expires_at is not None
        left = attempt.lease_expires_at - session.scalar(select(func.now()))  # type: ignore[operator]
        assert left.total_seconds() > database.lease_s - 5


def test_a_job_placed_on_a_host_that_died_goes_elsewhere(database: Settings) -> None:
    with open_session() as session:
        make_host(session, "alpha")
        job = make_job(session)
        reconcile(session)
        assert place_jobs(session) == 0, "the reconciler placed it"
        make_host(session, "beta")
        session.execute(update(Host).where(Host.name == "alpha").values(heartbeat_at=func.now() - timedelta(hours=1)))
        reconcile(session)
        assert session.get_one(Attempt, (job.id, 2)).host_name == "beta"
        assert session.get_one(Attempt, (job.id, 1)).end_reason == "host_lost"


def test_only_one_reconciler_works_at_a_time(database: Settings) -> None:
    with open_session() as first:
        reconcile(first)
        with open_session() as second:
            make_host(second)
            make_job(second)
            reconcile(second)
            assert second.scalars(select(Attempt)).all() == []


# ---- the outbox


def read_queue(queue: str) -> list[dict[str, Any]]:
    """Take all messages of a queue."""
    taken: list[dict[str, Any]] = []
    with (
        get_celery().connection_for_read() as connection,
        connection.SimpleQueue(queue) as simple,
        contextlib.suppress(simple.Empty),
    ):
        while True:
            message = simple.get_nowait()
            taken.append(message.payload[1])
            message.ack()
    return taken


def test_a_message_is_sent_after_the_commit_and_again_until_it_is_claimed(database: Settings) -> None:
    read_queue(host_queue("alpha"))
    with open_session() as session:
        make_host(session)
        job = make_job(session)
        place_jobs(session)
    assert publish_outbox() == 2
    assert publish_outbox() == 0
    expected = {"job_id": job.id, "attempt": 1}
    assert read_queue(host_queue("alpha")) == [expected]
    assert sweep_outbox() == 0, "it is not late yet"
    with open_session() as session:
        session.execute(update(Outbox).values(sent_at=func.now() - timedelta(minutes=1)))
    assert sweep_outbox() == 1
    assert read_queue(host_queue("alpha")) == [expected]
    with open_session() as session:
        assert claim_attempt(session, job.id, 1, "alpha")
    assert sweep_outbox() == 0
    with open_session() as session:
        assert session.scalars(select(Outbox)).all() == []


def test_without_a_broker_the_message_waits(database: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from store import queue, settings

    monkeypatch.setenv("BURNISH_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.get_settings.cache_clear()
    queue.get_celery.cache_clear()
    with open_session() as session:
        make_job(session)
    assert publish_outbox() == 0
    with open_session() as session:
        assert session.scalars(select(Outbox.sent_at)).all() == [None]
