"""The lease of an attempt, renewed by a thread of its own, so that nothing that the supervisor does can delay it."""

import logging
import threading
import time

from store.attempts import renew_lease
from store.errors import FencedError
from store.session import AWAY, open_session
from store.status import JobStatus

log = logging.getLogger(__name__)


class LeaseKeeper(threading.Thread):
    """Renews until stopped. `wish` is the job's desired status, `fenced` says that the attempt is not ours any more."""

    def __init__(self, job_id: str, number: int, renew_s: float) -> None:
        super().__init__(name="lease", daemon=True)
        self.wish: JobStatus | None = None
        self.fenced = False
        self._job_id, self._number, self._renew_s = job_id, number, renew_s
        self._renewed_at = time.monotonic()
        self._stop_asked = threading.Event()

    @property
    def away_s(self) -> float:
        """Seconds for which the database has not been reached."""
        return max(0.0, time.monotonic() - self._renewed_at - self._renew_s)

    def run(self) -> None:
        while not self._stop_asked.is_set() and not self.fenced:
            self._renew()
            self._stop_asked.wait(self._renew_s)

    def stop(self) -> None:
        self._stop_asked.set()

    def _renew(self) -> None:
        try:
            with open_session() as session:
                self.wish = renew_lease(session, self._job_id, self._number) or self.wish
            self._renewed_at = time.monotonic()
        except FencedError as fenced:
            log.warning("%s", fenced)
            self.fenced = True
        except AWAY as away:
            log.warning("the database is away, training goes on: %s", str(away).splitlines()[0])
        except Exception:
            log.exception("the lease could not be renewed; trying again")
