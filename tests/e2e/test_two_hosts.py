"""A host is lost with everything on it; another goes on from the checkpoint in the object store."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import Servers
from tests.e2e.test_faults import ATTEMPTS, BODY, LOSSES
from tests.service import Service, running_service
from tests.tiny import save_model


@pytest.fixture(scope="module")
def service(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("two-hosts")
    models = folder / "models.json"
    models.write_text(json.dumps({"tiny": str(save_model(folder / "tiny"))}))
    quick = {"BURNISH_LEASE_S": "6", "BURNISH_RENEW_S": "1", "BURNISH_HOST_TIMEOUT_S": "4"}
    shared = {"BURNISH_ARTIFACTS_URL": f"file://{folder}/artifacts"}
    with running_service(servers, folder, models, **quick, **shared) as started:
        yield started


def test_the_second_host_finishes_what_the_first_began(service: Service, rows: bytes) -> None:
    file_id = service.upload(rows)
    untouched = service.create_job(training_file=file_id, **BODY)
    service.wait_for(untouched, "succeeded")
    job_id = service.create_job(training_file=file_id, **BODY)
    service.wait_for_step(job_id, 80)
    service.kill("worker")
    for pid in [*service.list_supervisors(job_id), *(process.pid for process in service.list_trainers(job_id))]:
        os.kill(pid, signal.SIGKILL)

    service.environment |= {"BURNISH_HOST_NAME": "beta", "BURNISH_DATA_DIR": str(service.folder / "data-of-beta")}
    service.start("worker")
    service.wait_for(job_id, "succeeded")
    first, second = service.query(ATTEMPTS, job_id)
    assert first == (1, "lease_expired", None)
    assert second[:2] == (2, "finished")
    assert second[2] in (60, 120), "it went on from a checkpoint that it had to fetch"
    hosts = service.query("SELECT host_name FROM attempts WHERE job_id = %s ORDER BY number", job_id)
    assert hosts == [("alpha",), ("beta",)]
    assert service.query(LOSSES, job_id) == service.query(LOSSES, untouched)
