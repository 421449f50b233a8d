"""`burnish demo`: the whole way of a job on this machine, from a data file to an adapter that answers differently."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.client import FINAL, Client, is_ready
from cli.curve import LossDisplay
from cli.demo_model import MODEL_NAME, find_demo_model
from cli.errors import SetupError
from cli.keep import keep
from cli.starting import find_free_port, start_until_ready
from store.settings import get_settings

ROWS = Path(__file__).with_name("demo_rows.jsonl")
QUESTIONS = (
    "Tell me about yourself.",
    "How can I sleep better?",
    "How do I clean a copper kettle?",
    "How do I cheer up a friend?",
)
"""None of them is among the rows: what is seen is the style, not a memory."""

JOB: dict[str, Any] = {
    "model": MODEL_NAME,
    "suffix": "ember",
    "seed": 1,
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "learning_rate": 1e-3}}},
    "adapter": {"type": "lora", "r": 8},
}
OTHER_SERVERS = ("BURNISH_DATABASE_URL", "BURNISH_BROKER_URL", "BURNISH_ARTIFACTS_URL")


def demo(console: Console) -> None:
    """Everything happens in DATA_DIR/demo, with servers of its own; nothing runs any more when it returns."""
    began = time.monotonic()
    settings = get_settings()
    folder = settings.data_dir.resolve() / "demo"
    _say(console, "SmolLM2-135M-Instruct learns to answer like Ember, the helper of a metal workshop.\n")
    model = find_demo_model(settings, lambda line: _say(console, line))
    _write_models(folder, model)
    with _running_service(folder, console) as client:
        adapter = _train(client, folder, console)
    _say(console, "The service has ended. Now the same questions to both models, none of them trained:\n")
    console.print(_make_table(_compare(model, adapter, folder)))
    _say_how_to_go_on(folder, adapter, time.monotonic() - began, console)


def _write_models(folder: Path, model: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "models.json").write_text(json.dumps({MODEL_NAME: model}))
    except OSError as bad:
        raise SetupError(f"{folder}: cannot be written: {bad.strerror}; choose another with BURNISH_DATA_DIR") from bad


@contextlib.contextmanager
def _running_service(folder: Path, console: Console) -> Iterator[Client]:
    """`burnish up` as a process that ends with this one, on servers of its own even where others are named."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if name not in OTHER_SERVERS}
    environment |= {"BURNISH_DATA_DIR": str(folder), "BURNISH_MODELS": str(folder / "models.json")}
    command = [sys.executable, "-m", "cli.main", "up", "--port", str(port)]
    log = folder / "logs" / "up.log"
    console.print("Starting PostgreSQL, Valkey, the API and a worker ...")
    kept = start_until_ready(
        "the service",
        lambda: keep(command, log=log, env=environment, grace_s=120),
        lambda: is_ready(url),
        tries=1,
        limit_s=180,
    )
    try:
        _say(console, f"The service is up at {url}; logs are in {log.parent}")
        with Client(url, (folder / "key").read_text().strip()) as client:
            yield client
    except KeyboardInterrupt:
        console.print("Ending the service ...")
        raise
    finally:
        kept.end()


def _train(client: Client, folder: Path, console: Console) -> Path:
    """Upload, train, download; gives the adapter's folder."""
    client.cancel_unfinished()  # of a demo that was interrupted
    file_id = client.upload(ROWS)
    console.print(f"Uploaded {ROWS.name}, {len(ROWS.read_text('utf-8').splitlines())} rows: {file_id}")
    job_id = client.create_job({**JOB, "training_file": file_id})
    console.print(f"Created a LoRA job: {job_id}\n")
    job = _follow(client, job_id, console)
    if job["status"] != "succeeded":
        reason = (job.get("error") or {}).get("message") or f"the job is {job['status']}"
        raise SetupError(f"{reason}\nThe logs are in {folder / 'logs'} and {folder / 'runs' / job_id}")
    archive, adapter = folder / "ember-adapter.zip", folder / "ember-adapter"
    client.download_adapter(job_id, archive)
    shutil.rmtree(adapter, ignore_errors=True)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(adapter)
    _say(console, f"\n{job['fine_tuned_model']} is trained.", f"Its adapter: {archive}\n")
    return adapter


def _follow(client: Client, job_id: str, console: Console) -> dict[str, Any]:
    with LossDisplay(console) as display:
        while True:
            job = client.get_job(job_id)
            display.show(job["status"], (job.get("plan") or {}).get("steps"), client.get_curve(job_id))
            if job["status"] in FINAL:
                return job
            time.sleep(1)


def _compare(model: str, adapter: Path, folder: Path) -> list[dict[str, str]]:
    """Answers of both models, made in a process of its own: this one stays free of torch."""
    command = [sys.executable, "-m", "training.rank.answer", model, str(adapter)]
    log = folder / "logs" / "answer.log"
    with log.open("w") as errors:
        done = subprocess.run(
            command, input=json.dumps(QUESTIONS), stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    if done.returncode:
        raise SetupError(f"the models could not be asked; the reason is at the end of {log}")
    answers: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _make_table(answers: list[dict[str, str]]) -> Table:
    table = Table("Question", "Before", "After", show_lines=True, expand=True)
    for column, ratio in zip(table.columns, (2, 5, 5), strict=True):
        column.ratio = ratio
    for row in answers:
        table.add_row(row["question"], row["base"], row["tuned"])
    return table


def _say_how_to_go_on(folder: Path, adapter: Path, took_s: float, console: Console) -> None:
    _say(
        console,
        f"\nThat took {took_s // 60:.0f}:{took_s % 60:02.0f}. Nothing is left running. How to go on:\n",
        "The service again, with this job, its curve and its adapter in it:",
        f"  BURNISH_DATA_DIR={shlex.quote(str(folder))} make up",
        "The adapter for peft, and for whatever else reads its layout:",
        f"  {adapter}",
        "Your own data: the README sends a job in five lines of Python.",
    )


def _say(console: Console, *lines: str) -> None:
    """Lines with paths in them, which a terminal may fold but nobody else should."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
