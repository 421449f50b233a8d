"""The row report of an uploaded file, made by a process of its own: what a file does to its reader stays there."""

import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from training.launch import make_environment

log = logging.getLogger(__name__)

MEMORY_BYTES = 4 * 2**30
CPU_S = 300
WALL_S = 420.0


def make_report(path: Path) -> dict[str, Any]:
    """What `python -m training validate` says of a file; that it could not be read where it says nothing."""
    command = [sys.executable, "-m", "training", "validate", str(path)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
    )
    _limit(process.pid)
    try:
        output, errors = process.communicate(timeout=WALL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    try:
        report: dict[str, Any] = json.loads(output)
    except ValueError:
        log.warning("no report, exit status %s: %s", process.returncode, errors.decode(errors="replace")[-2000:])
        return _unreadable()
    return report


def _environment() -> dict[str, str]:
    return make_environment(os.environ)


def _limit(pid: int) -> None:
    """Limits are set from here: a hook between fork and exec is not safe in a process with threads."""
    try:
        resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.prlimit(pid, resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    except ProcessLookupError:
        return  # It has ended already.


def _unreadable() -> dict[str, Any]:
    """An error of the whole file, which has no line."""
    message = (
        "the file could not be read: reading it ended without a result or took too much memory or time; "
        "split the file, or look for very long lines"
    )
    error = {"line": 0, "path": "", "code": "unreadable_file", "message": message}
    return {"format": None, "rows": 0, "errors": [error], "error_count": 1, "warnings": []}
