"""`python -m training.rank.torchrun --ranks R DIR --attempt N`: the ranks of a run on this host, started and watched by
torchrun; where there are several hosts, with those of the others (meeting.py).

When one of them ends, all do. What a failed rank said, or how it died, becomes the last event, and the exit code is
that of a run on one device.
"""

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from training.errors import BurnishError, RankDiedError, SpecError
from training.events import EventLog, read_events
from training.hardware import find_hardware
from training.node import Node, add_arguments, find_node
from training.plan import choose_device
from training.rank.ends import Ending, explain_endings, read_failures
from training.rank.lock import lock
from training.rank.meeting import STORE_S, meet
from training.rank.nodes import Nodes, Verdict
from training.rundir import COLLECTIVE_TIMEOUT_S, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RunDir
from training.spec import JobSpec, load_spec

MAY_DIFFER = {"model", "training_file", "validation_file", "resume_from", "suffix", "metadata"}
"""Fields of the specs of nodes: where the same files lie, and what is only noted."""


@dataclass(frozen=True)
class Launch:
    """What is started on this host. `others` are further arguments of the ranks; `node` is None where all are here."""

    run_dir: RunDir
    attempt: int
    ranks: int
    others: list[str]
    node: Node | None = None

    @property
    def writes(self) -> bool:
        """Whether rank 0 is here, and with it the events."""
        return self.node is None or self.node.rank == 0

    def tell_failure(self, step: int, data: dict[str, Any]) -> None:
        """As the last event, or where that is another node's to tell as the last line of the log."""
        if not self.writes:
            print(f"error: {data['message']}", file=sys.stderr)
            return
        with lock(self.run_dir.path / "lock", wait=False):
            events = EventLog(self.run_dir.events, self.attempt)
            events.append("failed", step, data)
            events.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.rank.torchrun", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="on this host")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    add_arguments(parser)
    asked, others = parser.parse_known_args()
    launch = Launch(RunDir(asked.run_dir.resolve()), asked.attempt, asked.ranks, others)
    try:
        spec = load_spec(launch.run_dir.spec)
        node = find_node(asked, spec.layout)
        if node is None:
            return _run_here(launch, spec)
        launch = replace(launch, node=node)
        return _run_with_others(launch, node, spec)
    except BurnishError as refused:  # before there are more processes than devices
        try:
            launch.tell_failure(0, refused.as_dict())
        except BlockingIOError:  # the events are another's
            print(f"error: {refused.message}", file=sys.stderr)
        return EXIT_FAILED


def _run_here(launch: Launch, spec: JobSpec) -> int:
    with _hold(launch):  # which rank 0 does from then on
        choose_device(spec, find_hardware())
    # All ranks are on this host, whose name may not be known to any network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # They meet on a free port of it.
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid4()}", "--local-addr=127.0.0.1"]
    ending = _run_ranks(launch, place)
    told = _find_end(launch)
    if told is not None:
        return told
    if not ending.failures and ending.ended_by in signal.Signals.__members__:  # before one of them could listen
        return -signal.Signals[ending.ended_by]
    launch.tell_failure(*explain_endings([ending], [], launch.ranks))
    return EXIT_FAILED


def _run_with_others(launch: Launch, node: Node, spec: JobSpec) -> int:
    layout, refusal = spec.layout, None
    with ExitStack() as held:
        try:
            held.enter_context(_hold(launch))
            choose_device(spec, find_hardware())
        except SpecError as error:
            refusal = error
        same = {name: value for name, value in spec.asked().items() if name not in MAY_DIFFER}
        nodes, attempt = meet(node, layout.nodes, same, launch.attempt, refusal)
        if launch.writes:
            held.close()
        launch = replace(launch, attempt=attempt)
        nodes.watch(lambda: _give_up(launch))
        place = [
            f"--nnodes={layout.nodes}",
            f"--node-rank={node.rank}",
            # Which ranks are whose is not left to the order in which they come: rank 0 is where the run directory is.
            "--rdzv-backend=static",
            f"--rdzv-endpoint={node.place}",
            f"--rdzv-id=attempt-{attempt}",
            f"--rdzv-conf=timeout={STORE_S:.0f}",
        ]
        ending = _run_ranks(launch, place)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # no rank is left that could be asked to stop
        return _conclude(launch, nodes, ending, layout.local_ranks)


@contextmanager
def _hold(launch: Launch) -> Iterator[None]:
    """The run directory. Raises SpecError where a process is at work in it."""
    try:
        with lock(launch.run_dir.path / "lock", wait=False):
            yield
    except BlockingIOError:
        message = f"another process is at work in {launch.run_dir.path}; wait for it or stop it"
        message += ", and give each node a folder of its own" if launch.node else ""
        raise SpecError(message, code="other_run") from None


def _run_ranks(launch: Launch, place: list[str]) -> Ending:
    """Start those of this host and wait for their end; `place` is how torchrun finds the others."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // launch.ranks)))
    node = launch.node.rank if launch.node else 0
    with tempfile.TemporaryDirectory(prefix="burnish-ranks-") as logs:
        config, command, arguments = config_from_args(
            parse_args(
                [
                    f"--nproc-per-node={launch.ranks}",
                    *place,
                    "--max-restarts=0",
                    # A rank that is asked to stop writes a checkpoint first.
                    f"--shutdown-timeout={COLLECTIVE_TIMEOUT_S:.0f}",
                    f"--log-dir={logs}",
                    "--module",
                    "training.rank",
                    *(str(launch.run_dir.path), "--attempt", str(launch.attempt), *launch.others),
                ]
            )
        )
        try:
            elastic_launch(config, command)(*arguments)
        except SignalException as asked:
            return Ending(node, read_failures(_find_said(Path(logs))), asked.sigval.name)
        except ChildFailedError as failed:
            return Ending(node, read_failures(failed.failures))
        except Exception as error:  # the others must not wait for ranks that there are not
            traceback.print_exc()
            return Ending(node, {}, f"{type(error).__name__}: {error}")
    return Ending(node, {})


def _find_said(logs: Path) -> dict[int, ProcessFailure]:
    """What ranks have said that failed while they were stopped."""
    files = {int(file.parent.name): file for file in logs.rglob("error.json")}
    return {rank: ProcessFailure(rank, 0, EXIT_FAILED, str(file)) for rank, file in files.items()}


def _conclude(launch: Launch, nodes: Nodes, own: Ending, local_ranks: int) -> int:
    """The exit code, once no rank is left on any node."""
    if not launch.writes:
        verdict = nodes.hear(own)
        if verdict is None:
            launch.tell_failure(*explain_endings([own], [0], local_ranks, nodes.count))
            return EXIT_FAILED
        if verdict.message is not None:
            print(f"error: {verdict.message}", file=sys.stderr)
        return verdict.code
    endings, lost = nodes.collect(own)
    code, message = _find_end(launch), None
    if code is None:
        step, data = explain_endings(endings, lost, local_ranks, nodes.count)
        launch.tell_failure(step, data)
        code, message = EXIT_FAILED, data["message"]
    nodes.tell(Verdict(code, message), [node for node in nodes.watched if node not in lost])
    return code


def _give_up(launch: Launch) -> int:
    """The exit code, where the end of a run takes far too long."""
    told = _find_end(launch) if launch.writes else None
    if told is None:
        error = RankDiedError("the run did not come to its end in time, once the ranks of one node had ended")
        launch.tell_failure(0, error.as_dict())
    return EXIT_FAILED if told is None else told


def _find_end(launch: Launch) -> int | None:
    """The exit code, where rank 0 told how the run ended. A failure is told here: it may know nothing of that of
    another."""
    events = read_events(launch.run_dir.events, 0)[0] if launch.run_dir.events.exists() else []
    told = next((event for event in reversed(events) if event.attempt == launch.attempt), None)
    codes = {"finished": EXIT_FINISHED, "stopped": EXIT_STOPPED}
    return None if told is None else codes.get(told.type)


if __name__ == "__main__":
    code = main()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that hear of other nodes would be torn down at work, which is taken for a crash.
    os._exit(code)
