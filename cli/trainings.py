"""Trainings outlive the worker that started them; at the end of `up` they are asked to stop where they can go on."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from store.settings import Settings
from worker.processes import end_processes

LAST_WRITES_S = 40.0
"""After the trainer's time of grace: what the supervisor needs to ship its checkpoint and to note the end."""


def end_trainings(settings: Settings) -> None:
    """Have every supervisor of this data folder stop its trainer with a checkpoint, and end whatever is left then.

    Database and broker have to be there still: a supervisor hands its attempt back before it leaves.
    """
    data_dir = settings.data_dir.resolve()
    _end(lambda: _find_supervisors(data_dir), settings.stop_grace_s + LAST_WRITES_S)
    # Of a supervisor that was killed: its trainer is known by its mark, which names a job with a run directory here.
    for run in settings.runs_dir.glob("*/"):
        end_processes(run.name, None, settings.stop_grace_s)


def _end(find: Callable[[], list[psutil.Process]], limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    asked: set[int] = set()
    while processes := find():
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() > limit:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
                    asked.add(process.pid)
        time.sleep(0.1)


def _find_supervisors(data_dir: Path) -> list[psutil.Process]:
    """Those that were told of this data folder; a number in a file might be anyone's by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ours = process.environ().get("BURNISH_DATA_DIR") == str(data_dir)
            if ours and process.status() != psutil.STATUS_ZOMBIE and "worker.supervise" in process.cmdline():
                found.append(process)
    return found
