"""The web service on a real port, with a real database and broker behind it."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.main import make_app
from store import settings
from store.keys import make_first_key
from store.session import open_session
from store.settings import Settings
from tests.api.service import serve
from tests.rows import make_project


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_DATA_DIR", str(tmp_path_factory.mktemp("service")))
        settings.get_settings.cache_clear()
        with serve(make_app()) as address:
            yield address


@pytest.fixture
def url(service: str, database: Settings) -> str:
    """The address of the service, which has this test's database and settings behind it."""
    return service


@pytest.fixture
def models_map(database: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's map of models, with one in it."""
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"tiny": "tiny-folder"}))
    monkeypatch.setenv("BURNISH_MODELS", str(path))
    settings.get_settings.cache_clear()
    return path


@pytest.fixture
def small_limit(database: Settings, monkeypatch: pytest.MonkeyPatch) -> int:
    """Uploads of 1 MiB at most."""
    monkeypatch.setenv("BURNISH_MAX_UPLOAD_BYTES", str(2**20))
    settings.get_settings.cache_clear()
    return 2**20


@pytest.fixture
def key(database: Settings) -> str:
    with open_session() as session:
        make_project(session)
        made = make_first_key(session)
    assert made is not None
    return made


@pytest.fixture
def http(url: str, key: str) -> Iterator[httpx.Client]:
    """A client with the first key."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False) as client:
        yield client
