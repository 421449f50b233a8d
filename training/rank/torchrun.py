"""`python -m training.rank.torchrun --ranks R DIR --attempt N`: the ranks of a run, started and watched by torchrun.

When one of them ends, all do. What a failed rank said, or how it died, becomes the last event, and the exit code is
that of a run on one device.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from training.errors import RankDiedError, SpecError
from training.events import Event, EventLog, read_events
from training.hardware import find_hardware
from training.plan import choose_device
from training.rank.failure import was_left
from training.rank.lock import lock
from training.rundir import COLLECTIVE_TIMEOUT_S, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RunDir
from training.spec import load_spec

HANGING_S = 10
"""After this time one that outlived the others, and had to be killed, is the one that they waited for."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.rank.torchrun", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    asked, others = parser.parse_known_args()
    run_dir = RunDir(asked.run_dir.resolve())
    try:
        with lock(run_dir.path / "lock", wait=False):  # which rank 0 takes
            choose_device(load_spec(run_dir.spec), find_hardware())
    except SpecError as refused:  # before there are more processes than devices
        _tell_failure(run_dir, asked.attempt, 0, refused.as_dict())
        return EXIT_FAILED
    except BlockingIOError:
        print(f"error: another process is at work in {run_dir.path}; wait for it or stop it", file=sys.stderr)
        return EXIT_FAILED
    _share_host(asked.ranks)
    with tempfile.TemporaryDirectory(prefix="burnish-ranks-") as logs:
        config, command, arguments = config_from_args(
            parse_args(
                [
                    f"--nproc-per-node={asked.ranks}",
                    # They meet on a free port of this host.
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=127.0.0.1:0",
                    f"--rdzv-id={uuid4()}",
                    "--local-addr=127.0.0.1",
                    "--max-restarts=0",
                    # A rank that is asked to stop writes a checkpoint first.
                    f"--shutdown-timeout={COLLECTIVE_TIMEOUT_S:.0f}",
                    f"--log-dir={logs}",
                    "--module",
                    "training.rank",
                    *(str(run_dir.path), "--attempt", str(asked.attempt), *others),
                ]
            )
        )
        try:
            elastic_launch(config, command)(*arguments)
        except SignalException as asked_to_stop:
            return _tell_end(run_dir, asked.attempt, _read_failures(Path(logs)), asked_to_stop.sigval)
        except ChildFailedError as failed:
            return _tell_end(run_dir, asked.attempt, failed.failures)
        return EXIT_FINISHED


def _share_host(ranks: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    # All ranks are on this host, whose name may not be known to any network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _tell_end(
    run_dir: RunDir, attempt: int, failures: dict[int, ProcessFailure], ended_by: signal.Signals | None = None
) -> int:
    """The exit code, once no rank is left. A failure is told here: rank 0 may know nothing of that of another."""
    told = _find_last(run_dir, attempt)
    if told is not None and told.type in ("finished", "stopped"):
        return EXIT_FINISHED if told.type == "finished" else EXIT_STOPPED
    if not failures and ended_by is not None:
        return -ended_by  # before the first of them could listen
    _tell_failure(run_dir, attempt, *explain_failures(failures))
    return EXIT_FAILED


def _tell_failure(run_dir: RunDir, attempt: int, step: int, data: dict[str, Any]) -> None:
    with lock(run_dir.path / "lock", wait=False):
        events = EventLog(run_dir.events, attempt)
        events.append("failed", step, data)
        events.close()


def _read_failures(logs: Path) -> dict[int, ProcessFailure]:
    """What ranks have said that failed while they were stopped."""
    files = {int(file.parent.name): file for file in logs.rglob("error.json")}
    return {rank: ProcessFailure(rank, 0, EXIT_FAILED, str(file)) for rank, file in files.items()}


def explain_failures(failures: dict[int, ProcessFailure]) -> tuple[int, dict[str, Any]]:
    """Step and error of the rank that failed first; those that were left waiting for it fail too, and come after it."""
    rank = min(failures, key=lambda rank: (was_left(failures[rank].error_file_data), failures[rank].timestamp))
    failure, told = failures[rank], failures[rank].error_file_data
    if "failure" not in told:
        waited = any(other.timestamp + HANGING_S < failure.timestamp for other in failures.values())
        steps = [other.error_file_data.get("step", 0) for other in failures.values()]
        return max(steps), {**RankDiedError(f"rank {rank} {_tell_death(failure, waited)}").as_dict(), "rank": rank}
    error = told["failure"]
    everywhere = all(other.error_file_data.get("failure") == error for other in failures.values())
    message = error["message"] if everywhere else f"rank {rank}: {error['message']}"
    return told["step"], {**error, "message": message, "rank": rank}


def _tell_death(failure: ProcessFailure, waited: bool) -> str:
    if waited:
        return "did not answer the others in time; log.txt says where each rank stood"
    if failure.exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL); the system does this when memory runs out"
    return f"died of {failure.signal_name()}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"


def _find_last(run_dir: RunDir, attempt: int) -> Event | None:
    events = read_events(run_dir.events, 0)[0] if run_dir.events.exists() else []
    return next((event for event in reversed(events) if event.attempt == attempt), None)


if __name__ == "__main__":
    code = main()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
