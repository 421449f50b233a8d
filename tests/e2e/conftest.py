"""One running service a module."""

import json
from collections.abc import Iterator

import pytest

from tests.conftest import Servers
from tests.service import Service, running_service
from tests.tiny import make_rows, save_model


@pytest.fixture(scope="module")
def service(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    models = folder / "models.json"
    models.write_text(json.dumps({"tiny": str(save_model(folder / "tiny"))}))
    with running_service(servers, folder, models) as started:
        yield started


@pytest.fixture(scope="session")
def rows() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in make_rows(16)).encode()
