"""Jobs over HTTP: made once, shown in the shapes of the OpenAI API, cancelled."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from store import queue, settings
from store.attempts import Outcome, claim_attempt, end_attempt
from store.models import Job, Outbox
from store.outbox import CONTROL_QUEUE
from store.placement import place_jobs
from store.runs import add_checkpoint, store_events
from store.session import open_session
from store.settings import Settings
from store.status import EndReason
from tests.api.service import ROW, upload
from tests.rows import make_host, make_job
from training.events import Event

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def body(http: httpx.Client, models_map: Path) -> dict[str, Any]:
    return {"model": "tiny", "training_file": upload(http).json()["id"]}


def start_job(**asked: Any) -> str:
    """A job that runs, without a process behind it."""
    with open_session() as session:
        make_host(session)
        job = make_job(session, **asked)
        place_jobs(session)
        assert claim_attempt(session, job.id, 1, "alpha")
    return job.id


def tell(job_id: str, *events: tuple[str, int, dict[str, Any]]) -> None:
    with open_session() as session:
        made = [Event(n, 1.0, 1, type, step, data) for n, (type, step, data) in enumerate(events, 1)]  # type: ignore[arg-type]
        store_events(session, job_id, 1, made)


def end(job_id: str, outcome: Outcome) -> None:
    with open_session() as session:
        end_attempt(session, job_id, 1, outcome)


def test_a_job_is_made_and_shown_as_the_openai_client_reads_it(http: httpx.Client, body: dict[str, Any]) -> None:
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    asked = {**body, "method": method, "suffix": "mine", "metadata": {"team": "a"}, "validation_file": None}
    answer = http.post(JOBS, json=asked)
    assert answer.status_code == 200
    job = answer.json()
    FineTuningJob.model_validate(job, strict=True)
    assert set(FineTuningJob.model_fields) <= set(job)
    assert job == http.get(f"{JOBS}/{job['id']}").json() == http.get(JOBS).json()["data"][0]
    assert (job["status"], job["model"], job["training_file"]) == ("queued", "tiny", body["training_file"])
    assert job["hyperparameters"] == {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert (job["method"], job["metadata"], job["suffix"]) == (method, {"team": "a"}, "mine")
    assert type(job["seed"]) is int
    nothing_yet = ("error", "fine_tuned_model", "finished_at", "trained_tokens", "validation_file", "plan")
    assert [job[name] for name in nothing_yet] == [None] * 6
    assert job["result_files"] == [] and job["desired_status"] is None and job["attempt"] == 0


def test_hyperparameters_in_the_old_place_are_shown_in_both(http: httpx.Client, body: dict[str, Any]) -> None:
    job = http.post(JOBS, json={**body, "hyperparameters": {"n_epochs": "auto", "batch_size": 4}}).json()
    assert job["method"]["supervised"]["hyperparameters"] == {"n_epochs": "auto", "batch_size": 4}
    assert job["hyperparameters"] == {"n_epochs": "auto", "batch_size": 4, "learning_rate_multiplier": "auto"}


def test_a_refused_job_names_the_field_at_fault(http: httpx.Client, body: dict[str, Any]) -> None:
    bad_rows = upload(http, ROW + "{}\n").json()["id"]
    for change, param, code, told in (
        ({"model": "tinny"}, "model", "model_not_found", "did you mean tiny?"),
        ({"model": "../../etc"}, "model", "model_not_found", "there are tiny"),
        ({"model": "org/name"}, "model", "model_not_found", "org/name"),
        ({"model": "ft:tiny:default::1"}, "model", "not_offered", "not offered yet"),
        ({"training_file": "/etc/passwd"}, "training_file", "file_not_found", "/etc/passwd"),
        ({"training_file": bad_rows}, "training_file", None, "line 2"),
        ({"validation_file": bad_rows}, "validation_file", None, "line 2"),
        ({"suffix": "x" * 65}, "suffix", "invalid_value", "64"),
        ({"lerning_rate": 1}, "lerning_rate", "unknown_field", "unknown field"),
        ({"integrations": []}, "integrations", "not_offered", "not offered yet"),
        ({"resources": {"gpus": 4, "nodes": 2}}, "resources.nodes", "not_offered", "on one host"),
    ):
        answer = http.post(JOBS, json={**body, **change})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
        assert code in (None, error["code"]) and told in error["message"], error
    assert http.get(JOBS).json()["data"] == []


def test_one_call_makes_one_job_however_often_it_is_repeated(http: httpx.Client, body: dict[str, Any]) -> None:
    def create(key: str, **change: Any) -> httpx.Response:
        return http.post(JOBS, json={**body, **change}, headers={"Idempotency-Key": key})

    with ThreadPoolExecutor(8) as pool:
        made = {answer.json()["id"] for answer in pool.map(create, ["key-1"] * 8)}
    assert len(made) == 1
    other = create("key-1", seed=5)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"
    assert create("key-2").json()["id"] not in made
    assert create("x" * 256).json()["error"]["param"] == "idempotency-key"


def test_a_retry_of_the_client_gets_the_job_of_its_first_try(http: httpx.Client, body: dict[str, Any]) -> None:
    def create(count: str) -> str:
        answer = http.post(JOBS, json=body, headers={"x-stainless-retry-count": count})
        made: str = answer.json()["id"]
        return made

    first = create("0")
    assert create("1") == first
    assert create("0") != first
    assert create("many") != first


@pytest.fixture
def broker_away(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BURNISH_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.get_settings.cache_clear()
    queue.get_celery.cache_clear()
    yield
    monkeypatch.undo()


def test_a_job_nudges_the_workers_after_its_commit(
    http: httpx.Client, body: dict[str, Any], database: Settings
) -> None:
    with redis.Redis.from_url(database.broker_url) as broker:
        broker.delete(CONTROL_QUEUE)
        http.post(JOBS, json=body)
        assert broker.blpop([CONTROL_QUEUE], timeout=5) is not None


def test_a_job_is_taken_while_the_broker_is_away(body: dict[str, Any], http: httpx.Client, broker_away: None) -> None:
    answer = http.post(JOBS, json=body)
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    with open_session() as session:
        assert session.query(Outbox).count() == 1


def test_a_queued_job_is_cancelled_at_once_and_only_once(http: httpx.Client, body: dict[str, Any]) -> None:
    job_id = http.post(JOBS, json=body).json()["id"]
    for content in (b"", b"{}"):
        answer = http.post(f"{JOBS}/{job_id}/cancel", content=content)
        assert (answer.status_code, answer.json()["status"], answer.json()["error"]) == (200, "cancelled", None)
    assert answer.json()["finished_at"] > 0


def test_a_running_job_is_cancelled_when_its_processes_are_gone(http: httpx.Client) -> None:
    job_id = start_job()
    for _ in range(2):
        job = http.post(f"{JOBS}/{job_id}/cancel").json()
        assert (job["status"], job["desired_status"], job["finished_at"]) == ("running", "cancelled", None)
    end(job_id, Outcome(EndReason.CANCELLED, "stopped", stop_s=0.1))
    job = http.get(f"{JOBS}/{job_id}").json()
    assert (job["status"], job["desired_status"], job["fine_tuned_model"]) == ("cancelled", None, None)


def test_a_job_shows_its_plan_and_in_the_end_its_model(http: httpx.Client) -> None:
    job_id = start_job(suffix="mine")
    tell(job_id, ("plan", 0, {"steps": 9, "n_epochs": 3.0, "batch_size": 2, "learning_rate": 1e-4}))
    job = http.get(f"{JOBS}/{job_id}").json()
    assert job["hyperparameters"] == {"n_epochs": 3, "batch_size": 2, "learning_rate_multiplier": 1.0}
    assert (job["plan"]["steps"], job["attempt"]) == (9, 1)
    end(job_id, Outcome(EndReason.FINISHED, "done", trained_tokens=123))
    job = http.get(f"{JOBS}/{job_id}").json()
    FineTuningJob.model_validate(job, strict=True)
    assert (job["status"], job["trained_tokens"], job["error"]) == ("succeeded", 123, None)
    assert job["fine_tuned_model"].startswith("ft:tiny:default:mine:") and job["finished_at"] >= job["created_at"]
    answer = http.post(f"{JOBS}/{job_id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_has_ended")
    assert answer.headers["x-should-retry"] == "false"


def test_a_failed_job_says_why(http: httpx.Client) -> None:
    job_id = start_job()
    error = {"code": "out_of_memory", "message": "m", "param": None, "fault": "capacity", "retryable": False}
    end(job_id, Outcome(EndReason.FAILED, "failed", error=error))
    job = http.get(f"{JOBS}/{job_id}").json()
    FineTuningJob.model_validate(job, strict=True)
    assert job["status"] == "failed" and job["error"] == {**error, "log_excerpt": None}


def test_metrics_are_columns_in_which_nothing_finite_is_lost(http: httpx.Client) -> None:
    job_id = start_job()
    empty = http.get(f"{JOBS}/{job_id}/metrics").json()
    assert (empty["columns"], empty["steps_total"]) == ({"step": []}, 0)
    steps: list[tuple[str, int, dict[str, Any]]] = [
        ("metrics", n, {"train_loss": 9.0 if n == 150 else 1.0 / n, "grad_norm": 0.5}) for n in range(1, 301)
    ]
    steps[2] = ("metrics", 3, {"train_loss": None, "grad_norm": 0.1, "non_finite": ["train_loss"]})
    tell(job_id, *steps, ("evaluated", 300, {"eval_loss": 0.25}))
    curve = http.get(f"{JOBS}/{job_id}/metrics").json()
    assert curve["columns"]["step"] == list(range(1, 301)) and curve["steps_total"] == 300
    assert curve["columns"]["train_loss"][2] is None and curve["non_finite"] == {"train_loss": [3]}
    assert curve["columns"]["eval_loss"] == [None] * 299 + [0.25]
    assert curve["attempts"] == {"1": 1}
    ask = {"names": "train_loss", "from_step": 100, "to_step": 200, "max_points": 20}
    part = http.get(f"{JOBS}/{job_id}/metrics", params=ask).json()["columns"]
    assert set(part) == {"step", "train_loss"} and len(part["step"]) <= 22
    assert part["step"][0] >= 100 and part["step"][-1] <= 200 and max(part["train_loss"]) == 9.0
    twice = http.get(f"{JOBS}/{job_id}/metrics?names=train_loss,step&names=grad_norm&x=step").json()["columns"]
    assert set(twice) == {"step", "train_loss", "grad_norm"}


def test_events_and_checkpoints_are_shown_as_the_openai_client_reads_them(http: httpx.Client) -> None:
    job_id = start_job()
    tell(job_id, ("metrics", 1, {"train_loss": 2.0}), ("warning", 1, {"message": "careful"}))
    with open_session() as session:
        add_checkpoint(session, job_id, 1, 1, "p", {"files": []}, {"train_loss": 2.0, "eval_loss": 1.5})
    events = http.get(f"{JOBS}/{job_id}/events", params={"limit": 100}).json()["data"]
    for event in events:
        FineTuningJobEvent.model_validate(event, strict=True)
        assert set(FineTuningJobEvent.model_fields) <= set(event)
    assert [event["level"] for event in events if event["message"] == "careful"] == ["warn"]
    [told] = [event for event in events if event["type"] == "metrics"]
    assert told["data"] == {"step": 1, "train_loss": 2.0}
    assert events[-1]["message"] == f"Created fine-tuning job: {job_id}"
    [checkpoint] = http.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    FineTuningJobCheckpoint.model_validate(checkpoint, strict=True)
    assert (checkpoint["step_number"], checkpoint["fine_tuning_job_id"]) == (1, job_id)
    assert checkpoint["metrics"] == {"step": 1, "train_loss": 2.0, "eval_loss": 1.5, "full_valid_loss": 1.5}


def test_jobs_are_found_by_their_metadata(http: httpx.Client, body: dict[str, Any]) -> None:
    for team in ("a", "b"):
        http.post(JOBS, json={**body, "metadata": {"team": team, "kind": "x"}})
    http.post(JOBS, json=body)
    for ask, count in (({}, 3), ({"metadata[kind]": "x"}, 2), ({"metadata[kind]": "x", "metadata[team]": "b"}, 1)):
        assert len(http.get(JOBS, params=ask).json()["data"]) == count
    assert http.get(JOBS, params={"metadata[team]": "c"}).json()["data"] == []


def test_a_job_of_an_older_version_can_still_be_shown(http: httpx.Client) -> None:
    with open_session() as session:
        job = make_job(session)
        session.flush()
        session.get_one(Job, job.id).spec = {**job.spec, "a_field_of_then": 1, "method": {"type": "dpo"}}
    shown = http.get(f"{JOBS}/{job.id}").json()
    assert shown["method"] == {"type": "dpo", "dpo": {"hyperparameters": {}}}
