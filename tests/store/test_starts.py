"""Jobs that start from what an earlier one made: only what fits, and it stays for as long as it is needed."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from store.attempts import Outcome, claim_attempt, end_attempt, load_run
from store.errors import InvalidRequestError
from store.events import switch_status
from store.models import Job
from store.placement import place_jobs
from store.runs import add_artifact, add_checkpoint, expire_checkpoints, list_checkpoints
from store.session import open_session
from store.settings import Settings
from store.starts import list_waited_for
from store.status import EndReason, JobStatus
from tests.rows import make_file, make_host, make_job

ADAPTER = {"r": 4, "dropout": 0.1}
FILES = [
    {"name": "adapter/adapter_model.safetensors", "bytes": 3, "sha256": "a" * 64},
    {"name": "state.pt", "bytes": 3, "sha256": "b" * 64},
]


def start_job(session: Session, **body: Any) -> Job:
    job = make_job(session, **{"adapter": ADAPTER, **body})
    place_jobs(session)
    assert claim_attempt(session, job.id, 1, "alpha")
    return job


@pytest.fixture
def earlier(database: Settings) -> str:
    """A running job with checkpoints of steps 2 and 4, of which it keeps one."""
    with open_session() as session:
        make_host(session, cpu_slots=4)
        job = start_job(session)
        job.plan = {"save_total_limit": 1}
        for step in (2, 4):
            add_checkpoint(session, job.id, 1, step, f"jobs/x/checkpoints/1/{step}", {"files": FILES}, {})
        return job.id


def checkpoint_id(job_id: str, step: int) -> str:
    return f"ftckpt-{job_id.removeprefix('ftjob-')}-{step}"


def test_a_run_from_a_checkpoint_gets_its_weights_and_no_optimizer(earlier: str) -> None:
    with open_session() as session:
        job = start_job(session, resume_from=checkpoint_id(earlier, 2))
        start = load_run(session, job.id, 1).start
    assert start == {
        "adapter/adapter_model.safetensors": ("jobs/x/checkpoints/1/2/adapter/adapter_model.safetensors", "a" * 64)
    }


def test_a_run_from_a_fine_tuned_model_gets_its_archive(earlier: str) -> None:
    with open_session() as session:
        add_artifact(session, earlier, 1, "adapter", "jobs/x/adapter/1.zip", 3, "c" * 64)
        end_attempt(session, earlier, 1, Outcome(EndReason.FINISHED, "finished"))
        name = session.get_one(Job, earlier).fine_tuned_model
        job = start_job(session, resume_from=name)
        assert load_run(session, job.id, 1).start == {"adapter.zip": ("jobs/x/adapter/1.zip", "c" * 64)}


def test_a_checkpoint_that_a_job_waits_for_is_kept_until_that_has_ended(earlier: str) -> None:
    with open_session() as session:
        job = make_job(session, adapter=ADAPTER, resume_from=checkpoint_id(earlier, 2))
        assert list_waited_for(session, [checkpoint_id(earlier, step) for step in (2, 4)]) == {
            checkpoint_id(earlier, 2)
        }
        assert len(expire_checkpoints(session, earlier, 1)) == 2
        switch_status(session, session.get_one(Job, job.id), JobStatus.CANCELLED, "cancelled")
        session.flush()
        assert expire_checkpoints(session, earlier, 1) == ["jobs/x/checkpoints/1/4"]
        assert [row.step for row in list_checkpoints(session, earlier, after=None, limit=9).items] == [4]
        with pytest.raises(InvalidRequestError, match="not kept any more"):
            make_job(session, adapter=ADAPTER, resume_from=checkpoint_id(earlier, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"resume_from": "ftckpt-nothing-2"}, "there is no 'ftckpt-nothing-2'"),
        ({"resume_from": "ft:tiny:default::1"}, "there is no 'ft:tiny:default::1'"),
        ({"resume_from": "/etc"}, "neither a checkpoint"),
        ({"resume_from": "../base"}, "neither a checkpoint"),
        ({"model": "other"}, "was trained on tiny, not on other; name tiny as the model"),
        ({"adapter": {}}, "made with adapter.r 4, this job asks for 8; set adapter.r to 4"),
        ({"adapter": {"type": "full"}}, "made with adapter.type lora, this job asks for full"),
        ({"adapter": {**ADAPTER, "target_modules": ["q_proj"]}}, "made with adapter.target_modules all-linear"),
    ],
)
def test_what_does_not_fit_is_refused(earlier: str, change: dict[str, Any], told: str) -> None:
    with open_session() as session, pytest.raises(InvalidRequestError) as refused:
        make_job(session, **{"adapter": ADAPTER, "resume_from": checkpoint_id(earlier, 2), **change})
    assert told in refused.value.message
    assert refused.value.param == "resume_from"


def test_what_belongs_to_another_project_is_not_there(earlier: str) -> None:
    with open_session() as session, pytest.raises(InvalidRequestError, match="there is no"):
        make_job(session, "strangers", adapter=ADAPTER, resume_from=checkpoint_id(earlier, 2))


def test_another_dropout_is_no_other_shape(earlier: str) -> None:
    with open_session() as session:
        job = make_job(session, adapter={"r": 4, "dropout": 0.5}, resume_from=checkpoint_id(earlier, 4))
        assert job.spec["resume_from"] == checkpoint_id(earlier, 4)


@pytest.mark.parametrize(
    ("made", "asked", "told"),
    [
        ({"init": "pissa"}, {}, "made with adapter.init pissa, which is not offered to start from yet"),
        ({"type": "ia3"}, {}, "made with adapter.type ia3, this job asks for lora"),
        ({"use_dora": True}, {}, "made with adapter.use_dora True, this job asks for False"),
        ({"use_rslora": True}, {}, "made with adapter.use_rslora True, this job asks for False"),
        ({"modules_to_save": ["norm"]}, {}, r"made with adapter.modules_to_save \['norm'\], this job asks for \[\]"),
        (
            {"type": "prompt", "num_virtual_tokens": 4},
            {"type": "prompt"},
            "made with adapter.num_virtual_tokens 4, this job asks for 20",
        ),
        ({"type": "qlora"}, {"type": "qlora"}, None),
        ({"type": "lora"}, {"type": "qlora", "bits": 8}, None),
        ({"type": "prefix"}, {"type": "prefix"}, None),
        ({"use_dora": True}, {"use_dora": True, "lora_plus_ratio": 16}, None),
    ],
)
def test_an_adapter_starts_from_one_of_its_own_shape(
    database: Settings, made: dict[str, Any], asked: dict[str, Any], told: str | None
) -> None:
    with open_session() as session:
        make_host(session, cpu_slots=4)
        job = start_job(session, adapter=made)
        add_checkpoint(session, job.id, 1, 2, "jobs/x/checkpoints/1/2", {"files": FILES}, {})
        if told is None:
            make_job(session, adapter=asked, resume_from=checkpoint_id(job.id, 2))
            return
        with pytest.raises(InvalidRequestError, match=told) as refused:
            make_job(session, adapter=asked, resume_from=checkpoint_id(job.id, 2))
        assert refused.value.code == "start_does_not_fit"


def test_preferences_start_from_what_supervised_training_made(earlier: str) -> None:
    with open_session() as session:
        for method, rows in {"dpo": "preference", "kto": "chat"}.items():
            file = make_file(session, report={"format": rows, "rows": 2, "errors": []})
            body = {"training_file": file.id, "method": {"type": method}, "resume_from": checkpoint_id(earlier, 2)}
            assert make_job(session, adapter=ADAPTER, **body).spec["resume_from"] == checkpoint_id(earlier, 2)
