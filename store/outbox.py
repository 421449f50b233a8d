"""Messages that are written with the change they tell of, and sent after its commit; a nudge, never the truth."""

from typing import Any

from sqlalchemy.orm import Session

from store.models import Outbox

CONTROL_QUEUE = "burnish.control"
"""Short tasks that any worker may do."""

PLACE_JOBS = "burnish.place_jobs"
RECONCILE = "burnish.reconcile"
START_ATTEMPT = "burnish.start_attempt"


def host_queue(host_name: str) -> str:
    return f"burnish.host.{host_name}"


def append_message(
    session: Session,
    queue: str,
    task: str,
    args: dict[str, Any],
    *,
    job_id: str | None = None,
    attempt: int | None = None,
) -> None:
    session.add(Outbox(queue=queue, task=task, args=args, job_id=job_id, attempt=attempt))
