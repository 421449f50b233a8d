"""The unmodified openai client, as its users write it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from store.runs import add_checkpoint
from store.session import open_session
from tests.api.service import ROW
from tests.api.test_job_routes import start_job, tell
from tests.rows import make_file


@pytest.fixture
def client(url: str, key: str, models_map: Path) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=20) as made:
        yield made


def test_a_file_goes_up_is_listed_read_and_deleted(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(ROW * 3)
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="fine-tune")
    assert (file.filename, file.bytes, file.status) == ("train.jsonl", len(ROW) * 3, "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).text == ROW * 3
    assert client.files.wait_for_processing(file.id).status == "processed"
    with open_session() as session:
        more = {make_file(session).id for _ in range(6)}
    listed = [found.id for found in client.files.list(limit=2)]
    assert set(listed) == more | {file.id} and len(listed) == 7
    assert [found.id for found in client.files.list(limit=3, order="asc", purpose="fine-tune")] == listed[::-1]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_job_is_made_listed_and_cancelled(client: openai.OpenAI) -> None:
    file = client.files.create(file=("train.jsonl", ROW.encode()), purpose="fine-tune")
    made = [
        client.fine_tuning.jobs.create(
            model="tiny",
            training_file=file.id,
            method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": n + 1, "batch_size": 1}}},
            metadata={"n": str(n)},
            extra_body={"precision": "fp32", "adapter": {"type": "lora", "r": 4}},
        )
        for n in range(5)
    ]
    assert made[3].hyperparameters.n_epochs == 4
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == [job.id for job in reversed(made)]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"n": "2"})] == [made[2].id]
    assert client.fine_tuning.jobs.cancel(made[0].id).status == "cancelled"
    assert client.fine_tuning.jobs.retrieve(made[0].id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(model="tinny", training_file=file.id)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.ConflictError):
        client.files.delete(file.id)


def test_events_and_checkpoints_are_turned_page_by_page(client: openai.OpenAI) -> None:
    job_id = start_job()
    tell(job_id, *(("metrics", n, {"train_loss": 1.0 / n}) for n in range(1, 8)))
    with open_session() as session:
        for step in (2, 4, 6):
            add_checkpoint(session, job_id, 1, step, "p", {"files": []}, {"train_loss": 1.0 / step})
    events = list(client.fine_tuning.jobs.list_events(job_id, limit=3))
    assert len({event.id for event in events}) == len(events) > 12
    assert [event.data["step"] for event in events if event.type == "metrics"] == [7, 6, 5, 4, 3, 2, 1]  # type: ignore[index]
    assert events[-1].message == f"Created fine-tuning job: {job_id}"
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job_id, limit=1))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [6, 4, 2]
    assert checkpoints[0].metrics.train_loss == pytest.approx(1 / 6)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no/such/model")
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_is_the_clients_own_error(url: str, key: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.request_id
