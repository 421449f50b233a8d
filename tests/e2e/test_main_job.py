"""The main job through every real part: an unmodified `openai` client, the API, the worker, the trainer."""

import io
import json
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from openai import OpenAI

from tests.service import Service, wait_until

LOAD_ALONE = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(adapter)
ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
plain = AutoModelForCausalLM.from_pretrained(base)
before = plain(torch.tensor([ids])).logits
tuned = PeftModel.from_pretrained(plain, adapter)(torch.tensor([ids])).logits
print(json.dumps({"moved": float((before - tuned).abs().max()), "finite": bool(tuned.isfinite().all())}))
"""


@pytest.fixture
def client(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key=service.key)


def test_an_unmodified_openai_client_goes_the_whole_way(
    service: Service, client: OpenAI, rows: bytes, tmp_path: Path
) -> None:
    training = client.files.create(file=("train.jsonl", rows), purpose="fine-tune")
    validation = client.files.create(file=("valid.jsonl", rows), purpose="fine-tune")
    assert client.files.content(training.id).content == rows
    assert "tiny" in [model.id for model in client.models.list()]

    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=training.id,
        validation_file=validation.id,
        suffix="tone",
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 2, "learning_rate_multiplier": 2}},
        },
        extra_body={"adapter": {"r": 4}},
    )
    assert job.status in ("validating_files", "queued", "running")
    assert (job.fine_tuned_model, job.finished_at, job.trained_tokens) == (None, None, None)

    service.wait_for(job.id, "succeeded")
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.fine_tuned_model is not None
    assert job.fine_tuned_model.startswith("ft:tiny:default:tone:")
    assert job.trained_tokens is not None
    assert job.trained_tokens > 0
    assert job.hyperparameters.n_epochs == 2
    assert job.error is None or job.error.code is None
    assert job.id in [each.id for each in client.fine_tuning.jobs.list(limit=1)]

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))
    assert len({event.id for event in events}) == len(events)
    assert events[0].message.startswith("The job has successfully completed")
    assert events[-1].message == f"Created fine-tuning job: {job.id}"
    steps = [event.data["step"] for event in events if event.type == "metrics" and "train_loss" in event.data]
    plan = service.get_job(job.id)["plan"]
    assert steps == list(range(plan["steps"], 0, -1))

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert checkpoints[0].step_number == plan["steps"]
    assert checkpoints[0].metrics.train_loss is not None

    with service.http as http:
        answer = http.get(f"/v1/fine_tuning/jobs/{job.id}/adapter")
        assert answer.status_code == 200
        part = http.get(f"/v1/fine_tuning/jobs/{job.id}/adapter", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, answer.content[10:20])
    assert answer.headers["etag"] == f'"{sha256(answer.content).hexdigest()}"'
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path / "adapter")
        config = json.loads(archive.read("adapter_config.json"))
    assert config["base_model_name_or_path"] == "tiny", "the operator's folders are nobody's business"
    base = json.loads(Path(service.environment["BURNISH_MODELS"]).read_text())["tiny"]
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_ALONE, base, str(tmp_path / "adapter")], check=True, capture_output=True, text=True
    )
    told = json.loads(loaded.stdout)
    assert told["finite"]
    assert told["moved"] > 0


def test_a_full_fine_tuning_gives_a_whole_model_and_no_adapter(service: Service, rows: bytes) -> None:
    file_id = service.upload(rows)
    job_id = service.create_job(
        training_file=file_id, adapter={"type": "full"}, hyperparameters={"n_epochs": 1, "batch_size": 4}
    )
    service.wait_for(job_id, "succeeded")
    with service.http as http:
        answer = http.get(f"/v1/fine_tuning/jobs/{job_id}/model")
        assert http.get(f"/v1/fine_tuning/jobs/{job_id}/adapter").status_code == 404
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= set(archive.namelist())


def test_a_job_starts_from_what_an_earlier_one_made_and_old_checkpoints_are_gone(service: Service, rows: bytes) -> None:
    """At a rate of nothing the later jobs come to the very validation loss with which the first one ended."""
    files = dict.fromkeys(("training_file", "validation_file"), service.upload(rows))
    hyper = {"max_steps": 6, "batch_size": 4, "eval_steps": 6, "save_steps": 1, "save_total_limit": 2}
    first = service.wait_for(service.create_job(**files, hyperparameters=hyper), "succeeded")
    kept = service.get(f"/v1/fine_tuning/jobs/{first['id']}/checkpoints")["data"]
    assert [checkpoint["step_number"] for checkpoint in kept] == [6, 5]
    prefixes = service.query("SELECT object_prefix FROM checkpoints WHERE job_id = %s ORDER BY step", first["id"])
    assert {f"{key.rsplit('/', 2)[0]}" for key in list_objects(service, first["id"])} == {
        prefix for (prefix,) in prefixes
    }
    eval_loss = service.get_curve(first["id"])["eval_loss"][-1]
    hyper = {"max_steps": 1, "batch_size": 4, "eval_steps": 1, "learning_rate": 1e-30}
    for start in (first["fine_tuned_model"], kept[0]["id"]):
        job_id = service.create_job(**files, resume_from=start, hyperparameters=hyper)
        service.wait_for(job_id, "succeeded")
        assert service.get_curve(job_id)["eval_loss"][-1] == eval_loss


def list_objects(service: Service, job_id: str) -> list[str]:
    """The keys of the weights of a job's checkpoints."""
    root = Path(service.settings.artifacts.removeprefix("file://"))
    found = (root / "jobs" / job_id / "checkpoints").rglob("*.safetensors")
    return [path.relative_to(root).as_posix() for path in found]


def test_every_step_is_in_the_database_within_two_seconds_and_in_the_api_within_three(
    service: Service, rows: bytes
) -> None:
    job_id = service.create_job(
        training_file=service.upload(rows), hyperparameters={"max_steps": 300, "batch_size": 4, "save_steps": 100}
    )
    seen_at: dict[int, float] = {}

    def look() -> bool:
        curve = service.get(f"/v1/fine_tuning/jobs/{job_id}/metrics", from_step=max(seen_at, default=0) + 1)
        now = service.query("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0]
        seen_at.update(dict.fromkeys(curve["columns"]["step"], now))
        return len(seen_at) == 300

    wait_until(look, 120, service.tell)
    happened = dict(service.query("SELECT step, extract(epoch FROM at)::float8 FROM metrics WHERE job_id = %s", job_id))
    stored = dict(
        service.query(
            "SELECT step, extract(epoch FROM min(created_at))::float8 FROM events"
            " WHERE job_id = %s AND type = 'metrics' GROUP BY step",
            job_id,
        )
    )
    assert max(stored[step] - happened[step] for step in range(1, 301)) < 2
    assert max(seen_at[step] - happened[step] for step in range(1, 301)) < 3
    service.wait_for(job_id, "succeeded")


def test_rows_that_no_token_of_is_trained_fail_the_job_before_its_first_step(service: Service, rows: bytes) -> None:
    job_id = service.create_job(training_file=service.upload(rows), hyperparameters={"max_seq_len": 8})
    job = service.wait_for(job_id, "failed")
    assert job["error"]["code"]
    assert job["error"]["fault"] == "data"
    assert "token" in job["error"]["message"]
    assert service.get_curve(job_id)["step"] == []
    assert len(service.query("SELECT 1 FROM attempts WHERE job_id = %s", job_id)) == 1, "data is not tried twice"
    assert service.list_trainers(job_id) == []
