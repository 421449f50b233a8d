"""`burnish up`: the whole service on one machine, started in order, looked after, and ended without a rest."""

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import redis

from cli.client import is_ready
from cli.crew import Crew
from cli.embedded import EmbeddedPostgres, EmbeddedValkey, hold_folder
from cli.errors import SetupError
from cli.keep import Kept, keep
from cli.starting import check_port, start_until_ready
from cli.trainings import end_trainings
from store.base_models import list_models
from store.keys import make_first_key
from store.migrate import upgrade
from store.session import open_session, sqlalchemy_url
from store.settings import Settings, get_settings

Tell = Callable[[str], None]


def up(host: str, port: int, tell: Tell) -> None:
    """Run the service until a signal asks for the end. `tell` takes lines for people.

    Raises:
        SetupError: what of this machine is in the way.
    """
    data_dir = get_settings().data_dir.resolve()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        stack.enter_context(hold_folder(data_dir))
        check_port(host, port)
        try:
            tell(f"Burnish is starting; its data is in {data_dir}")
            crew = Crew(tell)
            settings = _begin_servers(stack, crew, data_dir)
            list_models()  # a map that cannot be read is told now
            new_key = prepare_database(settings)
            _begin_service(stack, crew, settings, host, port)
            _announce(settings, make_url(host, port), new_key, tell)
            while True:
                crew.look_after()
                time.sleep(0.5)
        except KeyboardInterrupt:
            tell("Burnish is ending; trainings write a checkpoint first ...")
    tell("Burnish has ended. Nothing is left running; the next start goes on from here.")


def make_url(host: str, port: int) -> str:
    """The address to reach a server at that listens on `host`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{reached}:{port}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """The first signal raises KeyboardInterrupt; further ones are ignored, so that none cuts the ending short."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin_servers(stack: contextlib.ExitStack, crew: Crew, data_dir: Path) -> Settings:
    """Embedded servers where no others are named; gives the settings that every process here is told."""
    asked, logs = get_settings(), data_dir / "logs"
    told = {"BURNISH_DATA_DIR": str(data_dir)}
    if asked.database_url:
        check_database(asked.database_url)
    else:
        postgres = stack.enter_context(EmbeddedPostgres(data_dir / "postgres", log=logs / "postgres.log"))
        stack.callback(crew.end, "PostgreSQL")
        crew.start("PostgreSQL", postgres.start)
        told["BURNISH_DATABASE_URL"] = postgres.url
    if asked.broker_url:
        check_broker(asked.broker_url)
    else:
        valkey = stack.enter_context(EmbeddedValkey(data_dir / "valkey", log=logs / "valkey.log"))
        stack.callback(crew.end, "Valkey")
        crew.start("Valkey", valkey.start)
        told["BURNISH_BROKER_URL"] = valkey.url
    if asked.models is None and (models := data_dir / "models.json").exists():
        told["BURNISH_MODELS"] = str(models)
    os.environ.update(told)
    get_settings.cache_clear()
    return get_settings()


def check_database(url: str) -> None:
    """Say what is wrong with the database's URL, or that nothing answers there."""
    driver_url = sqlalchemy_url(url).replace("postgresql+psycopg://", "postgresql://", 1)
    try:
        psycopg.connect(driver_url, connect_timeout=10).close()
    except psycopg.Error as bad:
        raise SetupError(f"BURNISH_DATABASE_URL: no connection: {str(bad).strip()}") from bad


def check_broker(url: str) -> None:
    """Say what is wrong with the broker's URL, or that nothing answers there."""
    try:
        host = urlsplit(url).hostname
        client = redis.Redis.from_url(url, socket_connect_timeout=10, retry=None)
    except ValueError as bad:
        raise SetupError(f"BURNISH_BROKER_URL: not as redis://host:6379/0: {bad}") from bad
    try:
        with client:
            client.ping()
    except redis.RedisError as bad:
        raise SetupError(f"BURNISH_BROKER_URL: no connection to {host}: {bad}") from bad


def prepare_database(settings: Settings) -> bool:
    """Bring the tables up to date and make the first key; whether one was made."""
    upgrade(settings.database_url)
    with open_session() as session:
        key = make_first_key(session)
        if key is not None:
            # Before the commit: a key that nobody could read would be lost.
            save_key(settings.data_dir, key)
    return key is not None


def key_file(data_dir: Path) -> Path:
    return data_dir / "key"


def save_key(data_dir: Path, key: str) -> None:
    """Write the key so that only its owner can read it, whole or not at all."""
    beside = data_dir / ".key"
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    beside.replace(key_file(data_dir))


def _begin_service(stack: contextlib.ExitStack, crew: Crew, settings: Settings, host: str, port: int) -> None:
    from worker.app import make_beat_command, make_worker_command  # reads the settings when it is imported

    logs = settings.data_dir / "logs"
    web = [sys.executable, "-m", "uvicorn", "api.main:app", "--host", host, "--port", str(port)]
    commands = {
        "API": (logs / "api.log", [*web, "--timeout-graceful-shutdown", "5"]),
        "worker": (logs / "worker.log", make_worker_command(settings)),
        "beat": (logs / "beat.log", make_beat_command()),
    }
    stack.callback(end_trainings, settings)
    stack.callback(crew.end, *commands)
    for name, (log, command) in commands.items():
        crew.start(name, _make_start(name, command, log, make_url(host, port)))


def _make_start(name: str, command: Sequence[str], log: Path, url: str) -> Callable[[], Kept]:
    def run() -> Kept:
        return keep(command, log=log, grace_s=15)

    if name == "API":
        return lambda: start_until_ready(name, run, lambda: is_ready(url))
    return run


def _announce(settings: Settings, url: str, new_key: bool, tell: Tell) -> None:
    key = key_file(settings.data_dir)
    tell("")
    tell(f"Burnish is up at {url}; Ctrl-C ends it.")
    tell(f"  logs    {settings.data_dir / 'logs'}")
    tell(f"  models  {_describe_models(settings)}")
    if not key.exists():
        tell("  key     made at an earlier start and no longer here; make another: burnish keys create")
        return
    tell(f"  key     {key}{' (new)' if new_key else ''}")
    tell("")
    tell("  For the openai client:")
    tell(f'    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY="$(cat {shlex.quote(str(key))})"')


def _describe_models(settings: Settings) -> str:
    if settings.models is None:
        return f'none yet; name some in {settings.data_dir / "models.json"}: {{"my-model": "/folder/or/file.gguf"}}'
    return f"{', '.join(model.name for model in list_models()) or 'none'} ({settings.models})"
