"""How jobs are made, listed and cancelled."""

from typing import Any

import pytest
from sqlalchemy import select

from store.attempts import claim_attempt
from store.errors import ConflictError, InvalidRequestError, NotFoundError
from store.events import list_events, switch_status
from store.jobs import cancel_job, create_job, get_job, list_jobs
from store.models import Event, Job, Outbox
from store.placement import place_jobs
from store.session import open_session
from store.settings import Settings
from store.status import ALLOWED_MOVES, JobStatus
from tests.rows import make_file, make_host, make_job
from training.spec import parse_spec

PROJECT = "proj-default"


def test_a_job_its_events_and_its_message_are_written_together(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        job = make_job(session)
    with open_session() as session:
        assert get_job(session, PROJECT, job.id).status == JobStatus.QUEUED
        told = [event.message for event in session.scalars(select(Event).order_by(Event.id))]
        assert told[0] == f"Created fine-tuning job: {job.id}"
        assert told[-1] == "Files validated, moving job to queued state"
        assert [message.queue for message in session.scalars(select(Outbox))] == ["burnish.control"]
    with pytest.raises(ZeroDivisionError), open_session() as session:
        make_job(session)
        raise ZeroDivisionError
    with open_session() as session:
        assert len(list_jobs(session, PROJECT, after=None, limit=10).items) == 1
        assert len(session.scalars(select(Outbox)).all()) == 1


def test_the_spec_is_stored_as_it_was_asked_and_the_seed_is_drawn_beside_it(database: Settings) -> None:
    with open_session() as session:
        job = make_job(session, suffix="mine", hyperparameters={"n_epochs": "auto", "batch_size": 2})
        assert job.spec["hyperparameters"] == {"n_epochs": "auto", "batch_size": 2}
        assert "seed" not in job.spec
        assert 0 <= job.seed < 2**31
        assert make_job(session, seed=7).seed == 7


@pytest.mark.parametrize("start", list(JobStatus))
def test_a_status_moves_only_as_the_table_allows(database: Settings, start: JobStatus) -> None:
    for to in JobStatus:
        with open_session() as session:
            job = make_job(session)
            job.status = start
            session.flush()
            before = session.query(Event).count()
            if to in ALLOWED_MOVES[start]:
                switch_status(session, job, to, "moved")
                session.flush()
                assert job.status == to
                assert session.query(Event).count() == before + 1
                assert (job.finished_at is not None) == to.is_final
            else:
                with pytest.raises(ConflictError):
                    switch_status(session, job, to, "moved")
                assert job.status == start


def test_a_file_that_cannot_be_trained_on_is_refused_with_its_place(database: Settings) -> None:
    error = {"line": 3, "path": "messages[1].content", "code": "wrong_type", "message": "a number, text expected"}
    report = {"format": "chat", "rows": 3, "errors": [error], "error_count": 2, "warnings": []}
    with open_session() as session:
        bad = make_file(session, report=report)
        other = make_file(session, purpose="evals")
        foreign = make_file(session, "other")
        for file_id, field, words in (
            (
                bad.id,
                "training_file",
                "line 3, messages[1].content: a number, text expected (2 row errors in all: GET",
            ),
            (other.id, "training_file", "purpose"),
            (foreign.id, "training_file", "no file"),
            ("file-nowhere", "training_file", "no file 'file-nowhere'"),
        ):
            spec = parse_spec({"model": "tiny", "training_file": file_id})
            with pytest.raises(InvalidRequestError) as refused:
                create_job(session, PROJECT, spec, idempotency_key=None, is_retry=False)
            assert words in refused.value.message
            assert refused.value.param == field


def make_report(format: str, labels: Any = None) -> dict[str, Any]:
    return {"format": format, "rows": 2, "errors": [], "error_count": 0, "warnings": [], "labels": labels}


FAULT = {"line": 2, "path": "label", "code": "invalid_label", "message": "text, true or false expected"}
CHAT, PAIRS = make_report("chat"), make_report("preference")
LABELLED = make_report("chat", {"desirable": 1, "undesirable": 1, "fault": None})
HALF_LABELLED = make_report("chat", {"desirable": 1, "undesirable": 0, "fault": FAULT})


@pytest.mark.parametrize(
    ("method", "good", "bad", "code", "words"),
    [
        ("dpo", PAIRS, CHAT, "wrong_format", "a chat row"),
        ("supervised", CHAT, PAIRS, "wrong_format", "is for method.type dpo; supervised is trained on a chat row"),
        ("pretrain", make_report("text"), CHAT, "wrong_format", "pretrain is trained on a plain text row"),
        ("kto", LABELLED, PAIRS, "wrong_format", "a preference row"),
        ("kto", LABELLED, CHAT, "missing_label", "kto needs true or false in each"),
        ("kto", LABELLED, HALF_LABELLED, "invalid_label", "line 2, label: text, true or false expected"),
    ],
)
def test_a_file_with_the_rows_of_another_method_is_refused_at_once(
    database: Settings, method: str, good: dict[str, Any], bad: dict[str, Any], code: str, words: str
) -> None:
    with open_session() as session:
        right, wrong = make_file(session, report=good).id, make_file(session, report=bad).id

        def create(**files: str) -> None:
            spec = parse_spec({"model": "tiny", "method": {"type": method}, **files})
            create_job(session, PROJECT, spec, idempotency_key=None, is_retry=False)

        create(training_file=right, validation_file=right)
        for param in ("training_file", "validation_file"):
            with pytest.raises(InvalidRequestError) as refused:
                create(**{"training_file": right, param: wrong})
            assert (refused.value.param, refused.value.code) == (param, code)
            assert words in refused.value.message


def test_a_repeated_call_makes_one_job(database: Settings) -> None:
    with open_session() as session:
        spec = parse_spec({"model": "tiny", "training_file": make_file(session).id})
        first = create_job(session, PROJECT, spec, idempotency_key=None, is_retry=False)
        retried = create_job(session, PROJECT, spec, idempotency_key=None, is_retry=True)
        again = create_job(session, PROJECT, spec, idempotency_key=None, is_retry=False)
        assert retried.id == first.id
        assert again.id != first.id
        keyed = create_job(session, PROJECT, spec, idempotency_key="k", is_retry=False)
        assert create_job(session, PROJECT, spec, idempotency_key="k", is_retry=False).id == keyed.id
        other = parse_spec({"model": "tiny", "training_file": spec.training_file, "suffix": "x"})
        with pytest.raises(ConflictError):
            create_job(session, PROJECT, other, idempotency_key="k", is_retry=False)


def test_a_listing_turns_its_pages_newest_first_and_refuses_a_foreign_cursor(database: Settings) -> None:
    with open_session() as session:
        made = [make_job(session, metadata={"n": str(n % 2)}).id for n in range(5)]
        foreign = make_job(session, "other").id
        first = list_jobs(session, PROJECT, after=None, limit=3)
        rest = list_jobs(session, PROJECT, after=first.items[-1].id, limit=3)
        assert [job.id for job in [*first.items, *rest.items]] == made[::-1]
        assert (first.has_more, rest.has_more) == (True, False)
        even = list_jobs(session, PROJECT, after=None, limit=9, metadata={"n": "0"})
        assert [job.id for job in even.items] == [made[4], made[2], made[0]]
        for after in (foreign, "ftjob-no"):
            with pytest.raises(InvalidRequestError):
                list_jobs(session, PROJECT, after=after, limit=3)
        with pytest.raises(NotFoundError):
            get_job(session, PROJECT, foreign)


def test_events_turn_their_pages_without_one_lost_or_twice(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        job = make_job(session)
        session.flush()
        seen: list[int] = []
        after, more = None, True
        while more:
            page = list_events(session, job.id, after=after, limit=2)
            seen += [event.id for event in page.items]
            after, more = f"ftevent-{page.items[-1].id}", page.has_more
        assert seen == sorted(set(seen), reverse=True)
        assert len(seen) == 3
        for after in ("ftevent-999999", "ftevent-²", "x", ""):
            with pytest.raises(InvalidRequestError):
                list_events(session, job.id, after=after, limit=2)


def test_what_has_not_started_is_cancelled_at_once_and_only_once(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        queued, placed = make_job(session), make_job(session, resources={"priority": 1})
        assert place_jobs(session) == 1
    for job in (queued, placed):
        with open_session() as session:
            assert cancel_job(session, PROJECT, job.id).status == JobStatus.CANCELLED
            assert cancel_job(session, PROJECT, job.id).status == JobStatus.CANCELLED
            told = [e.data for e in list_events(session, job.id, after=None, limit=50).items]
            assert told.count({"status": "cancelled"}) == 1
    with open_session() as session:
        assert not claim_attempt(session, placed.id, 1, "alpha"), "a cancelled job must not start"


def test_of_a_running_job_the_wish_is_noted(database: Settings) -> None:
    with open_session() as session:
        make_host(session)
        job = make_job(session)
        place_jobs(session)
        assert claim_attempt(session, job.id, 1, "alpha")
        for _ in range(2):
            cancelled = cancel_job(session, PROJECT, job.id)
            assert (cancelled.status, cancelled.desired_status) == (JobStatus.RUNNING, JobStatus.CANCELLED)


def test_a_job_that_has_ended_cannot_be_cancelled(database: Settings) -> None:
    with open_session() as session:
        job = session.get_one(Job, make_job(session).id)
        switch_status(session, job, JobStatus.FAILED, "broken")
        with pytest.raises(ConflictError):
            cancel_job(session, PROJECT, job.id)
        assert job.status == JobStatus.FAILED
