"""`burnish up` as a person uses it: it starts, tells, survives, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cli.client import ApiError, Client, is_ready
from cli.starting import find_free_port
from tests.cli.processes import wait_until
from tests.tiny import make_rows, save_model, write_rows
from training.events import read_events

START_LIMIT_S = 90
STEPS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "models.json").write_text(json.dumps({"tiny": str(model)}))
    return tmp_path


def test_it_tells_where_everything_is_and_leaves_nothing_running(folder: Path) -> None:
    with running_up(folder) as up:
        assert up.log_has(f"Burnish is up at {up.url}")
        assert up.log_has(f"export OPENAI_BASE_URL={up.url}/v1")
        assert up.log_has(f"tiny ({folder}/models.json)")
        key = folder / "key"
        assert key.stat().st_mode & 0o777 == 0o600
        assert key.read_text().strip() not in up.log.read_text(), "the key itself is not printed"
        with Client(up.url, key.read_text().strip()) as client:
            client.cancel_unfinished()
        with Client(up.url, "wrong") as client, pytest.raises(ApiError, match="401"):
            client.cancel_unfinished()
        check_keys(up)
        assert up.end(signal.SIGINT) == 0
        assert up.log_has("Nothing is left running")
    assert list_processes_of(folder) == []


def test_what_stands_in_the_way_is_told(folder: Path) -> None:
    with running_up(folder) as up:
        assert f"in use by process {up.process.pid}" in refuse(folder)
        assert f"--port {up.port}: in use by another program" in refuse(folder / "other", port=up.port)
    assert "--host 192.0.2.1: not an address of this machine" in refuse(folder, "--host", "192.0.2.1")
    assert "BURNISH_LEASE_S: " in refuse(folder, BURNISH_LEASE_S="soon")
    nowhere = f"postgresql://nobody@127.0.0.1:{find_free_port()}/x"
    assert "BURNISH_DATABASE_URL: no connection" in refuse(folder, BURNISH_DATABASE_URL=nowhere)
    (folder / "file").touch()
    assert "cannot be written" in refuse(folder / "file")
    (folder / "models.json").write_text("[]")
    assert "has to hold names" in refuse(folder)


def test_a_training_stops_with_a_checkpoint_and_goes_on_at_the_next_start(folder: Path) -> None:
    rows = write_rows(folder / "rows.jsonl", make_rows(40))
    with running_up(folder) as up, up.client() as client:
        hyper = {"max_steps": STEPS, "batch_size": 2, "save_steps": STEPS}
        body = {"model": "tiny", "training_file": client.upload(rows), "hyperparameters": hyper}
        job_id = client.create_job(body)
        wait_until(lambda: len(client.get_curve(job_id)["step"]) > 5, 120)
        assert up.end(signal.SIGTERM) == 0
    assert list_processes_of(folder) == []
    with running_up(folder) as up, up.client() as client:
        wait_until(lambda: client.get_job(job_id)["status"] == "succeeded", 120)
        assert client.get_curve(job_id)["step"] == list(range(1, STEPS + 1))
    events, _ = read_events(folder / "runs" / job_id / "events.jsonl", 0)
    steps = {number: [e.step for e in events if e.type == "metrics" and e.attempt == number] for number in (1, 2)}
    assert steps[1][0] == 1
    assert steps[2] == list(range(steps[1][-1] + 1, STEPS + 1)), "not one step is made twice"


def test_a_dead_part_is_started_again_and_a_killed_up_is_recovered(folder: Path) -> None:
    with running_up(folder) as up:
        for word, name in (("uvicorn", "API"), ("postgres", "PostgreSQL")):
            [process for process in list_processes_of(folder) if word in " ".join(process.cmdline())][-1].kill()
            wait_until(lambda name=name: up.log_has(f"{name} ended with status 137"), 30)
            wait_until(lambda name=name: up.log_has(f"{name} runs again"), 60)
        wait_until(lambda: is_ready(up.url), 30)
        up.process.kill()
        up.process.wait()
        wait_until(lambda: list_processes_of(folder) == [], 60)
    with running_up(folder) as up, up.client() as client:
        client.cancel_unfinished()


def check_keys(up: "Up") -> None:
    """A key made beside a running service opens it until it is revoked."""
    with Client(up.url, run_keys(up.folder, "create", "--name", "for a friend")) as client:
        client.cancel_unfinished()
        listed = next(line for line in run_keys(up.folder, "list").splitlines() if "for a friend" in line)
        run_keys(up.folder, "revoke", listed.split()[0])
        with pytest.raises(ApiError, match="401"):
            client.cancel_unfinished()
    assert "revoked  for a friend" in run_keys(up.folder, "list")


class Up:
    """A `burnish up` on a free port, with its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "up.log"
        with self.log.open("ab") as output:
            self.process = start(folder, "--port", str(self.port), output=output.fileno())

    def client(self) -> Client:
        return Client(self.url, (self.folder / "key").read_text().strip())

    def log_has(self, text: str) -> bool:
        return text in self.log.read_text()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(90)


@contextmanager
def running_up(folder: Path) -> Iterator[Up]:
    up = Up(folder)
    try:
        wait_until(lambda: up.process.poll() is not None or up.log_has(f"up at {up.url}"), START_LIMIT_S)
        assert up.process.poll() is None, up.log.read_text()
        yield up
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGTERM)


def run_keys(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "BURNISH_DATA_DIR": str(folder)}
    command = (sys.executable, "-m", "cli.main", "keys", *arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def start(folder: Path, *options: str, output: int, **environment: str) -> subprocess.Popen[str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith("BURNISH_")}
    told |= {"BURNISH_DATA_DIR": str(folder), **environment}
    command = (sys.executable, "-m", "cli.main", "up", *options)
    return subprocess.Popen(command, env=told, stdout=output, stderr=subprocess.STDOUT, text=True)


def refuse(folder: Path, *options: str, port: int | None = None, **environment: str) -> str:
    """What an `up` says that ends with an error."""
    options = (*options, "--port", str(port or find_free_port()))
    process = start(folder, *options, output=subprocess.PIPE, **environment)
    said, _ = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    return said


def list_processes_of(folder: Path) -> list[psutil.Process]:
    """Every living process that was told of this data folder or names it."""
    found = []
    for process in psutil.process_iter():
        try:
            told = process.environ().get("BURNISH_DATA_DIR") == str(folder)
            names = any(str(folder) in word for word in process.cmdline())
            if (told or names) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
