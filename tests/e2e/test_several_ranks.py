"""A job on several ranks through the whole service: torchrun below the supervisor, its ranks found and ended."""

import signal
from typing import Any

from tests.service import Service

BODY: dict[str, Any] = {"adapter": {"r": 4}, "seed": 5, "parallelism": {"strategy": "ddp", "data": 2}}
LOSSES = "SELECT step, data->>'train_loss' FROM metrics WHERE job_id = %s ORDER BY step"


def test_a_job_on_two_ranks_comes_to_what_one_comes_to_though_a_rank_is_killed(service: Service, rows: bytes) -> None:
    """A rank that dies ends the attempt, which counts as the infrastructure's; the next one goes on."""
    file_id = service.upload(rows)
    hyper = {"max_steps": 300, "batch_size": 4, "save_steps": 50, "learning_rate": 1e-4}
    alone = service.create_job(training_file=file_id, hyperparameters=hyper, adapter={"r": 4}, seed=5)
    service.wait_for(alone, "succeeded")
    job_id = service.create_job(training_file=file_id, hyperparameters=hyper, **BODY)
    service.wait_for_step(job_id, 60)
    killed = max(service.list_trainers(job_id), key=lambda process: process.create_time())
    killed.send_signal(signal.SIGKILL)
    service.wait_for(job_id, "succeeded")
    job = service.get_job(job_id)
    assert (job["plan"]["ranks"], job["plan"]["strategy"]) == (2, "ddp")
    reasons = service.query("SELECT end_reason FROM attempts WHERE job_id = %s ORDER BY number", job_id)
    assert [reason for (reason,) in reasons] == ["host_fault", "finished"]
    got, want = service.query(LOSSES, job_id), service.query(LOSSES, alone)
    assert [step for step, _ in got] == list(range(1, 301))
    assert all(abs(float(a) - float(b)) < 1e-4 for (_, a), (_, b) in zip(got, want, strict=True))
    assert service.list_trainers(job_id) == []


def test_cancel_ends_all_ranks(service: Service, rows: bytes) -> None:
    hyper = {"max_steps": 100_000, "batch_size": 4}
    job_id = service.create_job(training_file=service.upload(rows), hyperparameters=hyper, **BODY)
    service.wait_for_step(job_id, 5)
    assert len(service.list_trainers(job_id)) >= 3, "torchrun and two ranks"
    with service.http as http:
        http.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
    service.wait_for(job_id, "cancelled", timeout_s=30)
    assert service.list_trainers(job_id) == []
