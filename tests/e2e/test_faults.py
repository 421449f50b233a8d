"""What the service survives: its processes are killed for real, and the curve is compared with an untouched run's."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from store.outbox import START_ATTEMPT, host_queue
from tests.service import Service, wait_until

HYPER = {"max_steps": 240, "batch_size": 4, "save_steps": 60}
BODY: dict[str, Any] = {"hyperparameters": HYPER, "seed": 5, "adapter": {"r": 4, "dropout": 0.1}}
LOSSES = "SELECT step, data->>'train_loss' FROM metrics WHERE job_id = %s ORDER BY step"
ATTEMPTS = "SELECT number, end_reason, resumed_from FROM attempts WHERE job_id = %s ORDER BY number"


@pytest.fixture(scope="module")
def file_id(service: Service, rows: bytes) -> str:
    return service.upload(rows)


@pytest.fixture(scope="module")
def untouched(service: Service, file_id: str) -> list[tuple[Any, ...]]:
    """Step and loss of a run that nothing happened to."""
    job_id = service.create_job(training_file=file_id, **BODY)
    service.wait_for(job_id, "succeeded")
    losses = service.query(LOSSES, job_id)
    assert [step for step, _ in losses] == list(range(1, 241))
    return losses


def start(service: Service, file_id: str, step: int) -> str:
    """A job that has made `step` steps."""
    job_id = service.create_job(training_file=file_id, **BODY)
    service.wait_for_step(job_id, step)
    return job_id


def check_end(service: Service, job_id: str, untouched: list[tuple[Any, ...]]) -> None:
    """One terminal event, the curve of the untouched run to the bit, listed checkpoints whole, no process left."""
    service.wait_for(job_id, "succeeded")
    assert service.query(LOSSES, job_id) == untouched
    told = service.query(
        "SELECT step FROM events WHERE job_id = %s AND type = 'metrics' AND message LIKE '%%training%%' ORDER BY id",
        job_id,
    )
    assert [step for (step,) in told] == list(range(1, 241)), "each step is told once and in order"
    ends = "SELECT count(*) FROM events WHERE job_id = %s AND data->>'status' IN ('succeeded', 'failed', 'cancelled')"
    assert service.query(ends, job_id) == [(1,)]
    assert service.list_trainers(job_id) == []
    wait_until(lambda: not service.list_supervisors(job_id), 10, service.tell)


def test_killing_the_celery_worker_does_not_disturb_the_training(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    job_id = start(service, file_id, 20)
    trainers = [process.pid for process in service.list_trainers(job_id)]
    service.kill("worker")
    service.wait_for_step(job_id, 100)
    assert [process.pid for process in service.list_trainers(job_id)] == trainers
    service.start("worker")
    check_end(service, job_id, untouched)
    assert service.query(ATTEMPTS, job_id) == [(1, "finished", None)]


def test_killing_the_trainer_brings_attempt_2_from_the_last_checkpoint(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    job_id = start(service, file_id, 80)
    for process in service.list_trainers(job_id):
        process.send_signal(signal.SIGKILL)
    check_end(service, job_id, untouched)
    (first, second) = service.query(ATTEMPTS, job_id)
    assert first == (1, "trainer_died", None)
    assert second[:2] == (2, "finished")
    assert second[2] in (60, 120, 180), "it went on from a checkpoint"


def test_killing_the_supervisor_brings_another_that_adopts_the_trainer(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    job_id = start(service, file_id, 20)
    (trainer,) = service.list_trainers(job_id)
    for pid in service.list_supervisors(job_id):
        os.kill(pid, signal.SIGKILL)
    check_end(service, job_id, untouched)
    assert not trainer.is_running()
    assert service.query(ATTEMPTS, job_id) == [(1, "finished", None)]
    told = service.query(
        "SELECT step, count(*) FROM events WHERE job_id = %s AND message LIKE 'New checkpoint%%' GROUP BY step", job_id
    )
    assert dict(told) == {60: 1, 120: 1, 180: 1, 240: 1}, "a checkpoint is shipped once"


def test_killing_supervisor_and_trainer_at_once_loses_nothing(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    job_id = start(service, file_id, 80)
    for pid in [*service.list_supervisors(job_id), *(process.pid for process in service.list_trainers(job_id))]:
        os.kill(pid, signal.SIGKILL)
    check_end(service, job_id, untouched)
    assert [number for number, *_ in service.query(ATTEMPTS, job_id)] == [1, 2]


def test_a_host_that_is_asked_to_stop_lets_go_with_a_checkpoint(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    job_id = start(service, file_id, 70)
    for pid in service.list_supervisors(job_id):
        os.kill(pid, signal.SIGTERM)
    check_end(service, job_id, untouched)
    (first, second) = service.query(ATTEMPTS, job_id)
    assert first[1] == "stopped"
    assert second[2] >= 70, "what was trained until the stop is kept"


def test_an_object_store_that_takes_nothing_holds_up_neither_a_cancel_nor_the_job_for_ever(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    """A file stands where the folder of the job's objects should be."""
    body = {**BODY, "hyperparameters": {**HYPER, "save_steps": 5}}
    for cancelled in (True, False):
        job_id = service.create_job(training_file=file_id, **body)
        in_the_way = service.folder / "data" / "artifacts" / "jobs" / job_id
        in_the_way.parent.mkdir(exist_ok=True)
        in_the_way.write_text("")
        wait_until(lambda job_id=job_id: find_event(service, job_id, "cannot be stored yet"), 60, service.tell)
        if cancelled:
            with service.http as http:
                http.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
            service.wait_for(job_id, "cancelled", timeout_s=30)
        else:
            in_the_way.unlink()
            service.wait_for(job_id, "succeeded")
            assert [step for step, _ in service.query(LOSSES, job_id)] == [step for step, _ in untouched]


def find_event(service: Service, job_id: str, words: str) -> bool:
    statement = "SELECT count(*) > 0 FROM events WHERE job_id = %s AND message LIKE %s"
    return bool(service.query(statement, job_id, f"%{words}%")[0][0])


def test_fifty_copies_of_a_message_start_one_attempt(
    service: Service, file_id: str, untouched: list[tuple[Any, ...]]
) -> None:
    service.kill("worker")
    job_id = service.create_job(training_file=file_id, **BODY)
    app = Celery(broker=service.environment["BURNISH_BROKER_URL"])
    # The queue of the host is known before anything is placed: copies wait there when the worker comes.
    message = {"job_id": job_id, "attempt": 1}

    def send(_: int) -> None:
        app.send_task(START_ATTEMPT, kwargs=message, queue=host_queue("alpha"), ignore_result=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(25)))
    service.start("worker")
    service.wait_for(job_id, "running")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(25)))
    check_end(service, job_id, untouched)
    assert service.query(ATTEMPTS, job_id) == [(1, "finished", None)]
    starts = service.query("SELECT count(*) FROM events WHERE job_id = %s AND message LIKE 'Training on%%'", job_id)
    assert starts == [(1,)]


def test_a_message_that_was_lost_is_sent_again(service: Service, file_id: str) -> None:
    service.kill("worker")
    job_id = service.create_job(training_file=file_id, hyperparameters={"max_steps": 3})
    app = Celery(broker=service.environment["BURNISH_BROKER_URL"])
    with app.connection_for_write() as connection:
        connection.default_channel.client.flushdb()
    service.start("worker")
    service.wait_for(job_id, "succeeded")


def test_cancel_ends_every_process_before_the_job_says_cancelled(service: Service, file_id: str) -> None:
    body = {**BODY, "hyperparameters": {**HYPER, "max_steps": 100_000}}
    job_id = service.create_job(training_file=file_id, **body)
    service.wait_for_step(job_id, 5)
    assert service.list_trainers(job_id)
    with service.http as http:
        for _ in range(2):
            answer = http.post(f"/v1/fine_tuning/jobs/{job_id}/cancel").json()
            assert answer["status"] in ("running", "cancelled")
        while (job := http.get(f"/v1/fine_tuning/jobs/{job_id}").json())["status"] == "running":
            assert job["desired_status"] == "cancelled"
    assert job["status"] == "cancelled"
    assert service.list_trainers(job_id) == [], "no process may be left once the job says so"
    ((stop_s,),) = service.query("SELECT stop_s FROM attempts WHERE job_id = %s", job_id)
    assert stop_s < 10
    assert job["fine_tuned_model"] is None
    assert not job["error"]


def test_a_trainer_that_hides_its_children_and_ignores_the_end_is_ended(service: Service, file_id: str) -> None:
    """A grandchild in a session of its own, orphaned and deaf to SIGTERM, goes with the attempt."""
    import subprocess
    import sys

    body = {**BODY, "hyperparameters": {**HYPER, "max_steps": 100_000}}
    job_id = service.create_job(training_file=file_id, **body)
    service.wait_for_step(job_id, 1)
    (trainer,) = service.list_trainers(job_id)
    hidden = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    environment = {**os.environ, "BURNISH_ATTEMPT": trainer.environ()["BURNISH_ATTEMPT"]}
    subprocess.run(
        ["/bin/sh", "-c", '"$@" & exit 0', "sh", sys.executable, "-c", hidden],
        env=environment,
        start_new_session=True,
        check=True,
    )
    wait_until(lambda: len(service.list_trainers(job_id)) == 2, 10, service.tell)
    with service.http as http:
        http.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
    service.wait_for(job_id, "cancelled")
    assert service.list_trainers(job_id) == []
