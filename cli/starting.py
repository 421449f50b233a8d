"""Starting a server: a port for it, waiting until it answers, and saying why it does not."""

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path

from cli.errors import SetupError
from cli.keep import Kept

START_LIMIT_S = 60.0
START_TRIES = 3


def start_until_ready(
    name: str,
    run: Callable[[], Kept],
    answers: Callable[[], bool],
    *,
    tries: int = START_TRIES,
    limit_s: float = START_LIMIT_S,
) -> Kept:
    """Run a server until it answers. One that ends at once is tried again: after a crash the remains of the old one may
    hold its memory or port for a moment longer."""
    limit = time.monotonic() + limit_s
    for left in reversed(range(tries)):
        kept = run()
        while kept.poll() is None:
            if answers():
                return kept
            if time.monotonic() > limit:
                kept.end()
                raise SetupError(f"{name} does not answer after {limit_s:.0f} s; {_quote(kept.log)}")
            time.sleep(0.03)
        time.sleep(1 if left else 0)
    raise SetupError(f"{name} does not start; {_quote(kept.log)}")


def find_free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Say what is wrong with an address before a server trips over it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OverflowError:
        raise SetupError(f"--port {port}: a port is a number up to 65535") from None
    except OSError as bad:
        if bad.errno == errno.EADDRINUSE:
            raise SetupError(f"--port {port}: in use by another program; choose another port") from None
        if bad.errno in (errno.EACCES, errno.EPERM):
            raise SetupError(f"--port {port}: not allowed for this user; choose one above 1023") from None
        raise SetupError(f"--host {host}: not an address of this machine ({bad.strerror})") from None


def _quote(log: Path | None, lines: int = 12) -> str:
    if log is None or not log.exists():
        return ""
    last = log.read_text("utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join([f"; the end of {log}:", *(f"  {line}" for line in last)])
