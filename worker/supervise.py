"""The supervisor of one attempt, a process of its own: `python -m worker.supervise JOB NUMBER`.

It starts the trainer, or adopts the one that a killed supervisor left, brings its events, checkpoints and result to the
store, and at the end makes sure that no process is left before it says how the attempt ended.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import psutil
from sqlalchemy.orm import Session

from store.attempts import Outcome, RunInput, end_attempt, load_run
from store.base_models import BaseModel
from store.errors import FencedError
from store.queue import publish_outbox
from store.runs import forget_events, store_events, tell
from store.session import AWAY, open_session
from store.settings import Settings, get_settings
from store.status import EndReason, JobStatus
from training.errors import BurnishError
from training.events import Event, read_events
from training.launch import make_command, make_environment
from training.rundir import RunDir, checkpoint_name, write_json
from worker.lease import LeaseKeeper
from worker.prepare import clear_run, prepare_run
from worker.processes import (
    MARK,
    LockedError,
    become_subreaper,
    describe_exit,
    end_processes,
    find_processes,
    hold_lock,
    make_mark,
    reap,
)
from worker.ship import expire_checkpoints, ship_checkpoint, ship_result

log = logging.getLogger("worker.supervise")

T = TypeVar("T")


class GaveUpError(Exception):
    """Database or object store were away for too long."""


BATCH = 1000
"""Events in one transaction."""

LOG_EXCERPT_LINES = 30


def main(job_id: str, number: int) -> None:
    settings = get_settings()
    run = RunDir(settings.runs_dir / job_id)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    try:
        with hold_lock(lock_path(run)):
            Supervisor(settings, run, job_id, number).supervise()
    except LockedError:
        log.info("attempt %s of %s has a supervisor already", number, job_id)


def lock_path(run: RunDir) -> Path:
    return run.path / "supervisor.lock"


class Supervisor:
    def __init__(self, settings: Settings, run: RunDir, job_id: str, number: int) -> None:
        self.settings, self.run, self.job_id, self.number = settings, run, job_id, number
        self.lease = LeaseKeeper(job_id, number, settings.renew_s)
        self.uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self.shipping: list[Future[None]] = []
        self.waiting: list[Event] = []
        "Read from the run directory, not yet stored."
        self.offset = 0
        self.last: Event | None = None
        "The newest event of this attempt."
        self.trainer_pid: int | None = None
        self.exit_code: int | None = None
        self.stop_signal: int | None = None
        self.result_shipped = False
        self.abandoned = False
        "What is not shipped by now is not wanted any more."
        self.told_trouble = False

    def supervise(self) -> None:
        become_subreaper()
        signal.signal(signal.SIGTERM, self._note_signal)
        signal.signal(signal.SIGINT, self._note_signal)
        self.lease.start()
        try:
            self._start_or_adopt()
            outcome = self._follow() or self._read_outcome()
        except FencedError:
            outcome = None
        except BurnishError as bad:
            outcome = make_failure(bad.as_dict(), None)
        except Exception as bad:  # whatever it is, it ends this attempt, and counts: no loop without an end
            log.exception("the host could not run the attempt")
            outcome = make_host_fault(bad)
        self._close(outcome)

    # ---- start

    def _start_or_adopt(self) -> None:
        inputs = self._call(lambda session: load_run(session, self.job_id, self.number))
        earlier = self._read_note()
        living = find_processes(self.job_id, self.number)
        if living or (earlier.get("attempt") == self.number and earlier.get("trainer")):
            self.trainer_pid = living[0].pid if living else None
            log.info("adopting attempt %s of %s, trainer %s", self.number, self.job_id, self.trainer_pid)
            self._write_note(living[0] if living else None, started=True)
            return
        end_processes(self.job_id, None, 0)  # of earlier attempts that were fenced off
        if not self.run.events.exists() and inputs.last_seq:
            self._call(lambda session: forget_events(session, self.job_id, self.number))
        self._write_note(None, started=False)
        model = prepare_run(self.run, inputs)
        if not self._must_stop():
            self._start_trainer(inputs, model)

    def _start_trainer(self, inputs: RunInput, model: BaseModel) -> None:
        self.run.touch_heartbeat()
        is_local = Path(model.source).is_absolute()
        environment = make_environment(
            os.environ,
            gpus=inputs.gpus,
            offline=is_local,
            model_cache=self.settings.model_cache,
        )
        with self.run.log.open("ab") as output:
            trainer = subprocess.Popen(
                make_command(self.run.path, self.number, base_name=model.name if is_local else None),
                env={**environment, MARK: make_mark(self.job_id, self.number)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.trainer_pid = trainer.pid
        self._write_note(psutil.Process(trainer.pid), started=True)
        log.info("attempt %s of %s: trainer %s", self.number, self.job_id, trainer.pid)

    # ---- follow

    def _follow(self) -> Outcome | None:
        """Until the trainer has ended and all that it wrote is shipped; or until it has to be stopped."""
        while True:
            living = self._trainer_lives()
            self.run.touch_heartbeat()
            self._ingest()
            if stop := self._must_stop():
                return stop
            if not living and not self.waiting:
                if self.last is not None and self.last.type == "finished" and not self.result_shipped:
                    self.result_shipped = True
                    self._ship(lambda: ship_result(self.job_id, self.number, self.run))
                if all(upload.done() for upload in self.shipping):
                    return None
            time.sleep(self.settings.poll_s)

    def _must_stop(self) -> Outcome | None:
        if self.lease.fenced:
            raise FencedError(f"attempt {self.number} of {self.job_id} is not the current one")
        if self.lease.wish == JobStatus.CANCELLED:
            return Outcome(EndReason.CANCELLED, "The job was cancelled")
        if self.stop_signal is not None:
            return Outcome(EndReason.STOPPED, "The host was asked to stop its runs")
        if self.lease.away_s > self.settings.outage_limit_s:
            return Outcome(EndReason.STOPPED, "The database was away for too long")
        return None

    def _trainer_lives(self) -> bool:
        ended = reap()
        if self.trainer_pid in ended:
            self.exit_code = ended[self.trainer_pid]
            self.trainer_pid = None
        elif self.trainer_pid is not None and not psutil.pid_exists(self.trainer_pid):
            self.trainer_pid = None
        return self.trainer_pid is not None

    def _ingest(self) -> None:
        """Store new events; checkpoints are shipped after what led to them is stored."""
        if self.run.events.exists():
            events, self.offset = read_events(self.run.events, self.offset)
            self.waiting += events
            self.last = next((event for event in reversed(events) if event.attempt == self.number), self.last)
        while self.waiting:
            batch = self.waiting[:BATCH]
            try:
                with open_session() as session:
                    self.lease.wish = store_events(session, self.job_id, self.number, batch) or self.lease.wish
            except AWAY as away:
                log.warning("the database is away, events wait: %s", str(away).splitlines()[0])
                return
            del self.waiting[: len(batch)]
            for step in map(checkpoint_of, batch):
                if step:
                    self._ship(lambda step=step: self._ship_checkpoint(step))  # type: ignore[misc]

    def _ship_checkpoint(self, step: int) -> None:
        folder = self.run.checkpoints / checkpoint_name(step)
        if folder.exists():  # an old one may be gone: the engine keeps a bounded number
            ship_checkpoint(self.job_id, self.number, folder)
            expire_checkpoints(self.job_id, self.number)

    def _ship(self, work: Callable[[], None]) -> None:
        self.shipping.append(self.uploads.submit(self._until_done, work, optional=True))

    # ---- end

    def _read_outcome(self) -> Outcome:
        """What the trainer said last, else what its exit status tells."""
        for upload in self.shipping:
            upload.result()
        type_, data = (self.last.type, self.last.data) if self.last else (None, {})
        if type_ == "finished":
            tokens = data.get("trained_tokens")
            return Outcome(EndReason.FINISHED, "finished", exit_code=self.exit_code, trained_tokens=tokens)
        if type_ == "failed":
            return make_failure({**data, "log_excerpt": self._read_log_excerpt()}, self.exit_code)
        if type_ == "stopped":
            return Outcome(EndReason.STOPPED, f"The trainer stopped: {data.get('reason')}", exit_code=self.exit_code)
        message = describe_exit(self.exit_code)
        return Outcome(EndReason.TRAINER_DIED, message[0].upper() + message[1:], exit_code=self.exit_code)

    def _close(self, outcome: Outcome | None) -> None:
        """No process is left before the attempt is said to have ended; None says that it is not ours to end."""
        began = time.monotonic()
        # Only a stop keeps what was trained: it gets time for a checkpoint. Cancelled or fenced work is killed.
        keeps = outcome is not None and outcome.reason == EndReason.STOPPED
        end_processes(self.job_id, self.number, self.settings.stop_grace_s if keeps else 0)
        stop_s = round(time.monotonic() - began, 3)
        # Of a cancelled run nothing is wanted any more: an object store that is away does not hold up its end.
        self.abandoned = outcome is None or outcome.reason == EndReason.CANCELLED
        try:
            if outcome is not None:
                self._report(outcome, stop_s)
        except (FencedError, GaveUpError) as left:
            # Without the database nothing can be said: the lock goes free, and the host's next supervisor says it.
            log.warning("%s", left)
        finally:
            self.lease.stop()
            self.uploads.shutdown(cancel_futures=True)
            publish_outbox()

    def _report(self, outcome: Outcome, stop_s: float) -> None:
        self._until_done(self._drain)
        ended = Outcome(**{**outcome.__dict__, "stop_s": stop_s, "exit_code": self.exit_code})
        status = self._call(lambda session: end_attempt(session, self.job_id, self.number, ended))
        log.info("attempt %s of %s ended: %s, job %s", self.number, self.job_id, outcome.reason, status)
        if status.is_final:
            clear_run(self.run)

    def _drain(self) -> None:
        """What the trainer wrote while it was stopped."""
        self._ingest()
        if self.waiting:
            raise TimeoutError("events still wait for the database")
        if not self.abandoned:
            wait(self.shipping)

    def _call(self, work: Callable[[Session], T]) -> T:
        """One transaction, tried until the database is there."""
        result: list[T] = []

        def transact() -> None:
            with open_session() as session:
                result[:] = [work(session)]

        self._until_done(transact)
        return result[0]

    def _until_done(self, work: Callable[[], Any], *, optional: bool = False) -> None:
        """Do what must not be lost, again until database and object store take it; what is optional only until the run
        is abandoned.

        Raises:
            FencedError: the attempt is not ours any more.
            GaveUpError: they did not for as long as an outage may last, or it is not wanted any more.
        """
        began, wait_s = time.monotonic(), 0.5
        while True:
            try:
                work()
                return
            except (*AWAY, OSError) as away:
                trouble = str(away).splitlines()[0] if str(away) else repr(away)
            log.warning("trying again in %.0f s: %s", wait_s, trouble)
            if self.lease.fenced:
                raise FencedError(f"attempt {self.number} of {self.job_id} is not the current one")
            if (optional and self.abandoned) or time.monotonic() - began > self.settings.outage_limit_s:
                raise GaveUpError(trouble)
            self._tell_trouble(trouble)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 30)

    def _tell_trouble(self, trouble: str) -> None:
        """Once, to the job's users, where the database takes it."""
        if self.told_trouble:
            return
        with contextlib.suppress(*AWAY, FencedError), open_session() as session:
            tell(session, self.job_id, self.number, f"What was trained cannot be stored yet, trying again: {trouble}")
            self.told_trouble = True

    # ---- notes in the run directory

    @property
    def _note(self) -> Path:
        return self.run.path / "attempt.json"

    def _read_note(self) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads(self._note.read_bytes())
        except FileNotFoundError:
            return {}
        return note

    def _write_note(self, trainer: psutil.Process | None, *, started: bool) -> None:
        noted = {"pid": trainer.pid, "started_at": trainer.create_time()} if trainer else {"pid": None}
        me = psutil.Process()
        write_json(
            self._note,
            {
                "job_id": self.job_id,
                "attempt": self.number,
                "supervisor": {"pid": me.pid, "started_at": me.create_time()},
                "trainer": noted if started else None,
            },
        )

    def _read_log_excerpt(self) -> str:
        if not self.run.log.exists():
            return ""
        with self.run.log.open("rb") as file:
            file.seek(max(0, self.run.log.stat().st_size - 16_384))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_EXCERPT_LINES:])

    def _note_signal(self, signum: int, _frame: object) -> None:
        self.stop_signal = signum


def checkpoint_of(event: Event) -> int | None:
    """The step of a checkpoint that an event tells of. That which a run goes on from may never have been told: its
    writer was killed between the two."""
    if event.type == "checkpoint":
        return event.step
    return event.data.get("resumed_from") if event.type == "started" else None


def make_host_fault(bad: Exception) -> Outcome:
    reason = str(bad).splitlines()[0] if str(bad) else type(bad).__name__
    return Outcome(EndReason.HOST_FAULT, f"The host could not run the attempt: {reason}")


def make_failure(error: dict[str, Any], exit_code: int | None) -> Outcome:
    """A failure that was said. What the infrastructure did, such as a full disk, is tried again; all else is final."""
    lost = error["fault"] == "infrastructure"
    return Outcome(
        EndReason.HOST_FAULT if lost else EndReason.FAILED, error["message"], error=error, exit_code=exit_code
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main(sys.argv[1], int(sys.argv[2]))
