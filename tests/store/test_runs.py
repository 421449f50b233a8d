"""Events of a run become rows: each step once, in order, whatever is sent twice."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from store import models
from store.attempts import Outcome, claim_attempt, end_attempt
from store.events import list_events
from store.metrics import read_curve
from store.models import Attempt, Job, Metric
from store.placement import place_jobs
from store.runs import add_checkpoint, forget_events, is_stored, list_checkpoints, store_events
from store.session import open_session
from store.settings import Settings
from store.status import EndReason
from tests.rows import make_host, make_job
from training.events import Event, EventType


def start_job(session: Session) -> Job:
    make_host(session)
    job = make_job(session)
    place_jobs(session)
    assert claim_attempt(session, job.id, 1, "alpha")
    return job


def make_events(attempt: int, first_seq: int, *told: tuple[EventType, int, dict[str, Any]]) -> list[Event]:
    return [Event(first_seq + n, 1.0, attempt, type, step, data) for n, (type, step, data) in enumerate(told)]


def make_steps(attempt: int, first_seq: int, steps: range) -> list[Event]:
    return make_events(attempt, first_seq, *(("metrics", n, {"train_loss": 1 / n}) for n in steps))


def read_steps(session: Session, job_id: str) -> list[tuple[int, int]]:
    rows = session.execute(select(Metric.step, Metric.attempt).where(Metric.job_id == job_id).order_by(Metric.step))
    return [(step, attempt) for step, attempt in rows]


def test_events_that_are_sent_again_change_nothing(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        events = make_events(1, 1, ("started", 0, {"device": "cpu", "resumed_from": None})) + make_steps(
            1, 2, range(1, 6)
        )
        for part in (events[:3], events, events[2:5]):
            store_events(session, job.id, 1, part)
        session.flush()
        assert read_steps(session, job.id) == [(n, 1) for n in range(1, 6)]
        metrics = [e.step for e in list_events(session, job.id, after=None, limit=99).items if e.type == "metrics"]
        assert metrics == [5, 4, 3, 2, 1]


def test_a_resumed_attempt_replaces_what_came_after_its_checkpoint(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        started = ("started", 0, {"device": "cpu", "resumed_from": None})
        store_events(session, job.id, 1, make_events(1, 1, started) + make_steps(1, 2, range(1, 8)))
        add_checkpoint(session, job.id, 1, 4, "p", {}, {})
        add_checkpoint(session, job.id, 1, 6, "p", {}, {})
        end_attempt(session, job.id, 1, Outcome(EndReason.STOPPED, "stopped"))
        assert place_jobs(session) == 1
        assert claim_attempt(session, job.id, 2, "alpha")
        assert session.get_one(Attempt, (job.id, 2)).last_seq == 8, "one run directory, one sequence"
        resumed = ("started", 4, {"device": "cpu", "resumed_from": 4})
        store_events(session, job.id, 2, make_events(2, 9, resumed) + make_steps(2, 10, range(5, 6)))
        session.flush()
        assert read_steps(session, job.id) == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
        assert [c.step for c in list_checkpoints(session, job.id, after=None, limit=9).items] == [4]
        told = session.scalars(
            select(models.Event.step).where(models.Event.type == "metrics").order_by(models.Event.id)
        )
        assert list(told) == [1, 2, 3, 4, 5]


def test_a_run_that_goes_back_replaces_what_came_after_its_checkpoint(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        add_checkpoint(session, job.id, 1, 4, "p", {}, {})
        back = ("warning", 6, {"message": "back to step 4", "code": "loss_spike", "rolled_back_to": 4})
        events = make_steps(1, 1, range(1, 7)) + make_events(1, 7, back) + make_steps(1, 8, range(5, 6))
        store_events(session, job.id, 1, events)
        session.flush()
        assert [step for step, _ in read_steps(session, job.id)] == [1, 2, 3, 4, 5]
        assert [c.step for c in list_checkpoints(session, job.id, after=None, limit=9).items] == [4]
        told = [(e.level, e.step) for e in list_events(session, job.id, after=None, limit=99).items if e.step]
        assert told[:3] == [("info", 5), ("warn", 6), ("info", 4)]


def test_steps_that_a_killed_supervisor_left_in_the_file_are_stored_by_the_next_attempt(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        store_events(session, job.id, 1, make_steps(1, 1, range(1, 3)))
        end_attempt(session, job.id, 1, Outcome(EndReason.STOPPED, "stopped"))
        place_jobs(session)
        assert claim_attempt(session, job.id, 2, "alpha")
        left = make_steps(1, 1, range(1, 6))
        resumed = make_events(2, 6, ("started", 4, {"device": "cpu", "resumed_from": 4}))
        store_events(session, job.id, 2, left + resumed + make_steps(2, 7, range(5, 7)))
        assert [step for step, _ in read_steps(session, job.id)] == [1, 2, 3, 4, 5, 6]


def test_the_curve_has_columns_of_one_length_and_tells_what_was_not_finite(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        events = make_events(
            1,
            1,
            ("metrics", 1, {"train_loss": 2.0, "learning_rate": 0.1}),
            ("metrics", 2, {"train_loss": None, "non_finite": ["train_loss"], "learning_rate": 0.1}),
            ("evaluated", 2, {"eval_loss": 3.0}),
        )
        store_events(session, job.id, 1, events)
        curve = read_curve(session, job.id, names=None, from_step=None, to_step=None, max_points=None)
        assert curve.columns == {
            "step": [1, 2],
            "train_loss": [2.0, None],
            "learning_rate": [0.1, 0.1],
            "eval_loss": [None, 3.0],
        }
        assert curve.non_finite == {"train_loss": [2]}
        part = read_curve(session, job.id, names=["eval_loss"], from_step=2, to_step=2, max_points=None)
        assert part.columns == {"step": [2], "eval_loss": [3.0]}


def test_a_thinned_curve_keeps_its_spike_and_its_ends(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        steps = make_steps(1, 1, range(1, 1001))
        steps[500].data["train_loss"] = 99.0
        store_events(session, job.id, 1, steps)
        curve = read_curve(session, job.id, names=["train_loss"], from_step=None, to_step=None, max_points=50)
        assert len(curve.columns["step"]) <= 50
        assert curve.columns["step"][0] == 1
        assert curve.columns["step"][-1] == 1000
        assert 99.0 in curve.columns["train_loss"]


def test_text_that_the_database_cannot_hold_is_stored_as_escapes(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        store_events(session, job.id, 1, make_events(1, 1, ("warning", 0, {"message": "a\0b \ud800 c", "x": ["\0"]})))
        session.flush()
        newest = list_events(session, job.id, after=None, limit=1).items[0]
        assert newest.message == "a\\u0000b \\ud800 c"
        assert newest.level == "warn"


def go_on(session: Session, job: Job, number: int, host: str) -> None:
    """End the current attempt and have `host` claim the next one."""
    end_attempt(session, job.id, number - 1, Outcome(EndReason.STOPPED, "stopped"))
    job.attempt = number
    session.add(Attempt(job_id=job.id, number=number, host_name=host, gpus=[]))
    session.flush()
    assert claim_attempt(session, job.id, number, host)


def test_after_a_lost_run_directory_the_numbers_of_the_newest_attempt_count(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        store_events(session, job.id, 1, make_steps(1, 1, range(1, 10)))
        go_on(session, job, 2, "alpha")
        forget_events(session, job.id, 2)  # its run directory was lost
        started = ("started", 0, {"device": "cpu", "resumed_from": None})
        store_events(session, job.id, 2, make_events(2, 1, started) + make_steps(2, 2, range(1, 3)))
        go_on(session, job, 3, "alpha")
        assert session.get_one(Attempt, (job.id, 3)).last_seq == 3
        resumed = ("started", 2, {"device": "cpu", "resumed_from": 2})
        store_events(session, job.id, 3, make_events(3, 4, resumed) + make_steps(3, 5, range(3, 7)))
        assert read_steps(session, job.id) == [(1, 2), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3)]


def test_late_events_of_a_host_that_another_one_has_replaced_count_no_more(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        make_host(session, "beta")
        left_on_alpha = make_steps(1, 1, range(1, 7))
        store_events(session, job.id, 1, left_on_alpha[:3])
        go_on(session, job, 2, "beta")
        resumed = ("started", 2, {"device": "cpu", "resumed_from": 2})
        store_events(session, job.id, 2, make_events(2, 1, resumed) + make_steps(2, 2, range(3, 11)))
        go_on(session, job, 3, "alpha")
        again = ("started", 10, {"device": "cpu", "resumed_from": 10})
        store_events(session, job.id, 3, left_on_alpha + make_events(3, 7, again) + make_steps(3, 8, range(11, 13)))
        session.flush()
        expected = [(1, 1), (2, 1), *((step, 2) for step in range(3, 11)), (11, 3), (12, 3)]
        assert read_steps(session, job.id) == expected
        told = session.scalars(
            select(models.Event.step).where(models.Event.type == "metrics").order_by(models.Event.id)
        )
        assert list(told) == list(range(1, 13))


def test_a_cursor_stays_right_when_its_event_is_gone(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        store_events(session, job.id, 1, make_steps(1, 1, range(1, 6)))
        session.flush()
        newest = list_events(session, job.id, after=None, limit=1).items[0]
        older = [event.id for event in list_events(session, job.id, after=None, limit=99).items][1:]
        go_on(session, job, 2, "alpha")
        started = ("started", 0, {"device": "cpu", "resumed_from": None})
        store_events(session, job.id, 2, make_events(2, 6, started))
        session.flush()
        left = [event.id for event in list_events(session, job.id, after=f"ftevent-{newest.id}", limit=99).items]
        assert left
        assert set(left) < set(older)


def test_a_checkpoint_that_is_stored_is_known_by_its_manifest(database: Settings) -> None:
    with open_session() as session:
        job = start_job(session)
        add_checkpoint(session, job.id, 1, 4, "p", {"files": [1]}, {})
        assert is_stored(session, job.id, 4, {"files": [1]})
        assert not is_stored(session, job.id, 4, {"files": [2]})
        assert not is_stored(session, job.id, 5, {"files": [1]})
