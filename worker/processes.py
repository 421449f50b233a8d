"""Processes of an attempt: marked by their environment, found wherever they went, ended for certain."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARK = "BURNISH_ATTEMPT"
"""Every process that an attempt starts inherits this variable, `<job>/<number>`, also one that left its session."""

_PR_SET_CHILD_SUBREAPER = 36


class LockedError(Exception):
    """Somebody else holds the lock."""


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when the process ends, however it ends.

    Raises:
        LockedError: another process holds it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(str(path)) from None
        yield


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        with hold_lock(path):
            return False
    except LockedError:
        return True


def start_detached(module: str, args: list[str], log: Path) -> None:
    """Start `python -m module args` so that it outlives this process: handed to init, in a session of its own."""
    with log.open("ab") as output:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" & exit 0', "sh", sys.executable, "-m", module, *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=True,
        )


def become_subreaper() -> None:
    """Orphans among our descendants become our children, so that none of them is lost (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def make_mark(job_id: str, number: int) -> str:
    return f"{job_id}/{number}"


def find_processes(job_id: str, number: int | None = None) -> list[psutil.Process]:
    """Living processes of an attempt, oldest first; of any attempt of the job without a number."""
    mark = f"{MARK}={job_id}/".encode() if number is None else f"{MARK}={make_mark(job_id, number)}\0".encode()
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes() + b"\0"
            marked = environment.startswith(mark) or b"\0" + mark in environment
            if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def end_processes(job_id: str, number: int | None, grace_s: float) -> None:
    """Ask all processes of an attempt to end, kill those that have not after `grace_s`, return when none is left."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while processes := find_processes(job_id, number):
        late = time.monotonic() >= deadline
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if late:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
                    asked.add(process.pid)
        reap()
        time.sleep(0.05)
    reap()


def reap() -> dict[int, int]:
    """Collect children that ended; pid -> exit code, negative for a signal."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def describe_exit(code: int | None) -> str:
    if code is None:
        return "the trainer ended without a word"
    if code < 0:
        return f"the trainer was ended by {signal.Signals(-code).name}"
    return f"the trainer ended with exit code {code} and without a word"
