"""The parts of the service as commands of their own, for machines on which `up` does not start everything."""

import contextlib
import os
import time

from cli.crew import Crew
from cli.errors import SetupError
from cli.keep import keep
from cli.trainings import end_trainings
from cli.up import Tell, check_broker, check_database, ended_by_signals, key_file, prepare_database
from store.settings import Settings, get_settings

CHECKS = {"database_url": check_database, "broker_url": check_broker}


def migrate(tell: Tell) -> None:
    """Bring the tables up to date and, on the first start, make the first key."""
    settings = _require("database_url")
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    new_key = prepare_database(settings)
    tell(f"The tables are up to date.{f' The first key is in {key_file(settings.data_dir)}' if new_key else ''}")


def run_worker(tell: Tell) -> None:
    """This host's worker until a signal asks for the end. Celery is started again when it dies, which disturbs no
    training; at the end trainings write a checkpoint and go back into the queue."""
    settings = _require("database_url", "broker_url")
    # Absolute, as it is told to every process: supervisors and trainers are found by it.
    os.environ["BURNISH_DATA_DIR"] = str(settings.data_dir.resolve())
    get_settings.cache_clear()
    settings = get_settings()
    from worker.app import make_worker_command  # reads the settings when it is imported

    command = make_worker_command(settings)
    crew = Crew(tell)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        try:
            # After Celery has ended, so that nothing new is started meanwhile.
            stack.callback(end_trainings, settings)
            stack.callback(crew.end, "worker")
            crew.start("worker", lambda: keep(command, log=None, grace_s=15))
            tell(f"The worker of host {settings.host_name} is up; Ctrl-C ends it.")
            while True:
                crew.look_after()
                time.sleep(0.5)
        except KeyboardInterrupt:
            tell("The worker is ending; trainings write a checkpoint first ...")


def run_beat() -> None:
    """The reconciler's clock, in this process."""
    _require("database_url", "broker_url")
    from worker.app import make_beat_command

    command = make_beat_command()
    os.execv(command[0], command)  # noqa: S606 - our own argv, without a shell


def _require(*names: str) -> Settings:
    settings = get_settings()
    for name in names:
        if not getattr(settings, name):
            raise SetupError(f"BURNISH_{name.upper()} is not set; `burnish up` starts servers of its own instead")
        CHECKS[name](getattr(settings, name))
    return settings
