"""The whole service as processes of its own, for tests that use it as its users do and hurt it as the world does."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from store.migrate import upgrade
from store.settings import Settings
from tests.conftest import Servers
from worker.app import make_beat_command, make_worker_command
from worker.processes import find_processes

ROOT = Path(__file__).parents[1]


@dataclass
class Service:
    """API, beat and one worker on one host, on a database of their own."""

    folder: Path
    database_url: str
    environment: dict[str, str]
    port: int
    key: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> Settings:
        names = {name.removeprefix("BURNISH_").lower(): value for name, value in self.environment.items()}
        return Settings(**{name: value for name, value in names.items() if name in Settings.model_fields})  # type: ignore[arg-type]

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=30)

    def start(self, name: str) -> None:
        commands = {
            "api": [
                sys.executable,
                "-m",
                "uvicorn",
                "api.main:app",
                "--port",
                str(self.port),
                "--log-level",
                "warning",
            ],
            "worker": make_worker_command(self.settings),
            "beat": make_beat_command(),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                commands[name], env={**os.environ, **self.environment}, cwd=ROOT, stdout=log, stderr=log
            )

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(signum)
        process.wait(30)

    def check_alive(self) -> None:
        dead = [name for name, process in self.processes.items() if process.poll() is not None]
        assert not dead, f"{dead} died\n{self.tell()}"

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name, signal.SIGTERM)
        for pid in self.list_supervisors():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        for process in self.list_trainers():
            process.kill()

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database_url) as connection:
            return connection.execute(statement, values).fetchall()

    def list_supervisors(self, job_id: str = "") -> list[int]:
        return [p.pid for p in psutil.process_iter(["cmdline", "cwd"]) if self._supervises(p.info, job_id)]

    def _supervises(self, info: dict[str, Any], job_id: str) -> bool:
        line = info["cmdline"] or []
        ours = any(job == job_id or (not job_id and self._is_ours(job)) for job in line)
        return "worker.supervise" in line and ours

    def _is_ours(self, word: str) -> bool:
        return word.startswith("ftjob-") and (self.settings.runs_dir / word).exists()

    def list_trainers(self, job_id: str = "") -> list[psutil.Process]:
        if job_id:
            return find_processes(job_id)
        runs = self.settings.runs_dir.iterdir() if self.settings.runs_dir.exists() else []
        return [process for run in runs for process in find_processes(run.name)]

    # ---- as a client

    def upload(self, content: str | bytes, name: str = "train.jsonl") -> str:
        with self.http as http:
            answer = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": (name, content)})
        answer.raise_for_status()
        return str(answer.json()["id"])

    def create_job(self, **body: Any) -> str:
        with self.http as http:
            answer = http.post("/v1/fine_tuning/jobs", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def get(self, path: str, **params: Any) -> Any:
        with self.http as http:
            answer = http.get(path, params=params)
        answer.raise_for_status()
        return answer.json()

    def get_job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self.get(f"/v1/fine_tuning/jobs/{job_id}")
        return job

    def get_curve(self, job_id: str) -> dict[str, list[Any]]:
        curve: dict[str, list[Any]] = self.get(f"/v1/fine_tuning/jobs/{job_id}/metrics")["columns"]
        return curve

    def wait_for(self, job_id: str, *statuses: str, timeout_s: float = 120) -> dict[str, Any]:
        """The job once it has one of the statuses; fails at once where it has ended otherwise."""

        def look() -> dict[str, Any] | None:
            self.check_alive()
            job = self.get_job(job_id)
            ended = job["status"] in ("succeeded", "failed", "cancelled") and job["status"] not in statuses
            assert not ended, f"{job['status']}: {job['error']}\n{self.tell()}"
            return job if job["status"] in statuses else None

        return wait_until(look, timeout_s, lambda: f"{job_id} is still {self.get_job(job_id)['status']}\n{self.tell()}")

    def wait_for_step(self, job_id: str, step: int, timeout_s: float = 120) -> None:
        def reached() -> bool:
            steps = self.get_curve(job_id)["step"]
            return bool(steps) and steps[-1] >= step

        wait_until(reached, timeout_s, lambda: f"{job_id} never made step {step}\n{self.tell()}")

    def tell(self) -> str:
        """The ends of all logs, for a failure that has to be understood."""
        logs = [
            *self.folder.glob("*.log"),
            *self.settings.runs_dir.glob("*/*.log"),
            *self.settings.runs_dir.glob("*/log.txt"),
        ]
        return "\n".join(f"--- {log}\n{log.read_text('utf-8', 'replace')[-3000:]}" for log in logs)


def wait_until(look: Callable[[], Any], timeout_s: float, why: Callable[[], str]) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < end, f"after {timeout_s} s: {why()}"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def running_service(servers: Servers, folder: Path, models: Path, **settings: str) -> Iterator[Service]:
    """A started service that answers, with quick sweeps; all its processes are ended afterwards."""
    name = f"service_{folder.name}".replace("-", "_").lower()
    service = Service(folder, servers.make_database(name), {}, find_port())
    service.environment = {
        "BURNISH_DATABASE_URL": service.database_url,
        "BURNISH_BROKER_URL": servers.make_broker(),
        "BURNISH_DATA_DIR": str(folder / "data"),
        "BURNISH_MODELS": str(models),
        "BURNISH_HOST_NAME": "alpha",
        "BURNISH_SWEEP_S": "0.5",
        **settings,
    }
    upgrade(service.database_url)
    service.key = make_first_key_of(service)
    try:
        for process in ("api", "worker", "beat"):
            service.start(process)
        wait_until(lambda: is_ready(service), 60, service.tell)
        yield service
    finally:
        service.stop()


def make_first_key_of(service: Service) -> str:
    script = "from store.keys import *; from store.session import *\nwith open_session() as s: print(make_first_key(s))"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, **service.environment}
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def is_ready(service: Service) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{service.url}/readyz").status_code == 200
    return False


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
