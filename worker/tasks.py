"""The tasks: each done in well under a second; what takes long is a supervisor's."""

from store.attempts import claim_attempt
from store.outbox import PLACE_JOBS, RECONCILE, START_ATTEMPT
from store.placement import place_jobs as place
from store.queue import publish_outbox, sweep_outbox
from store.reconcile import reconcile as run_round
from store.session import open_session
from store.settings import get_settings
from worker.app import app
from worker.host import start_supervisor


@app.task(name=START_ATTEMPT)  # type: ignore[untyped-decorator]
def start_attempt(job_id: str, attempt: int) -> None:
    """Start an attempt that was placed on this host. Copies of the message find it claimed and do nothing."""
    settings = get_settings()
    with open_session() as session:
        claimed = claim_attempt(session, job_id, attempt, settings.host_name)
    if claimed:
        start_supervisor(settings, job_id, attempt)


@app.task(name=PLACE_JOBS)  # type: ignore[untyped-decorator]
def place_jobs() -> None:
    with open_session() as session:
        placed = place(session)
    if placed:
        publish_outbox()


@app.task(name=RECONCILE)  # type: ignore[untyped-decorator]
def reconcile() -> None:
    with open_session() as session:
        run_round(session)
    sweep_outbox()
