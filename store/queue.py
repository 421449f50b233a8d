"""The broker: one Celery app for all who send, and the publishing of the outbox."""

import logging
from datetime import timedelta
from functools import cache
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from sqlalchemy import and_, delete, exists, func, or_, select, update

from store.models import Attempt, Outbox
from store.outbox import CONTROL_QUEUE
from store.session import open_session
from store.settings import get_settings
from store.status import AttemptStatus

log = logging.getLogger(__name__)

BATCH = 200


@cache
def get_celery() -> Celery:
    """Settings after what was measured: early acknowledgement and short tasks, since a broker redelivers long ones;
    no results; JSON only; every wait has an end."""
    app = Celery("burnish", broker=get_settings().broker_url)
    app.conf.update(
        task_acks_late=False,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=CONTROL_QUEUE,
        task_time_limit=60,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_pool_acquire_timeout=5,
        broker_transport_options={
            "visibility_timeout": 3600,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
        },
        task_publish_retry=False,
    )
    return app


def publish_outbox() -> int:
    """Send what is unsent, oldest first; returns how many. A broker that is away is told in the log only: the sweep
    tries again. A message may go out twice (the sender died before its commit), which its reader allows for."""
    sent = 0
    try:
        while batch := _publish_batch():
            sent += batch
    except (OperationalError, OSError) as away:
        log.warning("the broker does not take messages, they wait: %s", away)
    return sent


def _publish_batch() -> int:
    with open_session() as session:
        query = select(Outbox).where(Outbox.sent_at.is_(None)).order_by(Outbox.id).limit(BATCH)
        messages = list(session.scalars(query.with_for_update(skip_locked=True)))
        if not messages:
            return 0
        with get_celery().producer_pool.acquire(block=True, timeout=5) as producer:
            for message in messages:
                get_celery().send_task(message.task, kwargs=message.args, queue=message.queue, producer=producer)
        done = [message.id for message in messages if message.job_id is None]
        session.execute(delete(Outbox).where(Outbox.id.in_(done)))
        waiting = [message.id for message in messages if message.job_id is not None]
        session.execute(update(Outbox).where(Outbox.id.in_(waiting)).values(sent_at=func.clock_timestamp()))
        return len(messages)


def sweep_outbox() -> int:
    """Make messages unsent again whose attempt was not claimed in time, drop those that are done with, and publish."""
    resend_after = timedelta(seconds=get_settings().resend_s)
    is_placed = and_(
        Attempt.job_id == Outbox.job_id, Attempt.number == Outbox.attempt, Attempt.status == AttemptStatus.PLACED
    )
    with open_session() as session:
        session.execute(delete(Outbox).where(Outbox.job_id.is_not(None), ~exists().where(is_placed)))
        late = or_(Outbox.sent_at < func.now() - resend_after, Outbox.sent_at.is_(None))
        session.execute(update(Outbox).where(Outbox.job_id.is_not(None), late).values(sent_at=None))
    return publish_outbox()


def ping_broker() -> None:
    """Raises when the broker does not answer within seconds."""
    with get_celery().connection_for_write(connect_timeout=3) as connection:
        connection.ensure_connection(max_retries=1, timeout=3)
        channel: Any = connection.default_channel
        channel.client.ping()
