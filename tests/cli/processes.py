"""What the tests of this folder look at: conditions that come true, and processes that are still there."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_until(condition: Callable[[], object], limit_s: float = 20) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.02)


def list_processes_in(folder: Path) -> list[psutil.Process]:
    """Every process that works in the folder; zombies work nowhere."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def list_running(*command: str) -> list[psutil.Process]:
    """Every process with exactly this command line."""
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == list(command)]
