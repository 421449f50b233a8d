"""What a worker does for its host beside its tasks: tell that it lives, find attempts without a supervisor."""

import logging
import threading

from store.attempts import list_running_on
from store.hosts import register_host, touch_host
from store.outbox import CONTROL_QUEUE, PLACE_JOBS, append_message
from store.queue import publish_outbox
from store.session import AWAY, open_session
from store.settings import Settings
from training.hardware import find_hardware
from training.rundir import RunDir
from worker.processes import is_locked, start_detached

log = logging.getLogger(__name__)

LONGEST_BEAT_S = 5.0


class HostKeeper(threading.Thread):
    def __init__(self, settings: Settings) -> None:
        super().__init__(name="host", daemon=True)
        self._settings = settings
        self._registered = False
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            try:
                self._beat()
            except AWAY as away:
                log.warning("the database is away: %s", str(away).splitlines()[0])
            except Exception:
                log.exception("the host could not be kept; trying again")
            self._stop_asked.wait(min(LONGEST_BEAT_S, self._settings.renew_s))

    def stop(self) -> None:
        self._stop_asked.set()

    def _beat(self) -> None:
        name = self._settings.host_name
        with open_session() as session:
            if self._registered:
                touch_host(session, name)
            else:
                register_host(session, name, find_hardware(), self._settings.cpu_slots)
                append_message(session, CONTROL_QUEUE, PLACE_JOBS, {})
            running = list_running_on(session, name)
        if not self._registered:
            publish_outbox()
        self._registered = True
        for job_id, number in running:
            adopt(self._settings, job_id, number)


def adopt(settings: Settings, job_id: str, number: int) -> None:
    """Start a supervisor for a claimed attempt of this host that has none. It takes over a trainer that still runs;
    where none was started yet, such as after a crash between claim and start, it starts one."""
    run = RunDir(settings.runs_dir / job_id)
    if not is_locked(run.path / "supervisor.lock"):
        start_supervisor(settings, job_id, number)


def start_supervisor(settings: Settings, job_id: str, number: int) -> None:
    """Start the supervisor of an attempt, detached. Where one lives already, the new one sees its lock and ends."""
    folder = settings.runs_dir / job_id
    folder.mkdir(parents=True, exist_ok=True)
    start_detached("worker.supervise", [job_id, str(number)], folder / "supervisor.log")
