"""The Celery worker of a host: `celery -A worker.app worker`; `make_worker_command` has the rest of the line."""

import sys
from typing import Any

from celery.signals import worker_ready, worker_shutdown

from store.outbox import CONTROL_QUEUE, RECONCILE, host_queue
from store.queue import get_celery
from store.settings import Settings, get_settings
from worker.host import HostKeeper

app = get_celery()
app.conf.update(
    imports=["worker.tasks"],
    beat_schedule={
        "reconcile": {
            "task": RECONCILE,
            "schedule": get_settings().sweep_s,
            # A round that nobody took in time is worth nothing: the next one does its work.
            "options": {"queue": CONTROL_QUEUE, "expires": 3 * get_settings().sweep_s},
        }
    },
)

_keepers: list[HostKeeper] = []


def make_worker_command(settings: Settings) -> list[str]:
    """Threads, since every task is short and waits for the database: nothing forks under open connections."""
    queues = f"{host_queue(settings.host_name)},{CONTROL_QUEUE}"
    options = [
        "--queues",
        queues,
        "--pool",
        "threads",
        "--concurrency",
        "4",
        "--hostname",
        f"worker@{settings.host_name}",
    ]
    quiet = ["--loglevel", "WARNING", "--without-gossip", "--without-mingle"]
    return [sys.executable, "-m", "celery", "--app", "worker.app", "worker", *options, *quiet]


def make_beat_command() -> list[str]:
    """A schedule kept in memory: after a start the reconciler runs at once, so there is nothing to remember."""
    schedule = ["--scheduler", "celery.beat:Scheduler", "--pidfile", "", "--loglevel", "WARNING"]
    return [sys.executable, "-m", "celery", "--app", "worker.app", "beat", *schedule]


@worker_ready.connect  # type: ignore[untyped-decorator]
def _start_keeper(**_: Any) -> None:
    _keepers.append(HostKeeper(get_settings()))
    _keepers[-1].start()


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _stop_keeper(**_: Any) -> None:
    for keeper in _keepers:
        keeper.stop()
