"""Worker hosts: they register, tell that they live, and offer GPUs or CPU slots."""

from datetime import timedelta

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.models import Host
from store.settings import get_settings
from training.hardware import Hardware


def register_host(session: Session, name: str, hardware: Hardware, cpu_slots: int) -> None:
    """Make the host known, or known again with what it has now."""
    values = {"hardware": hardware.model_dump(mode="json"), "cpu_slots": cpu_slots, "heartbeat_at": func.now()}
    statement = insert(Host).values(name=name, **values)
    session.execute(statement.on_conflict_do_update(index_elements=[Host.name], set_=values))


def touch_host(session: Session, name: str) -> None:
    session.execute(update(Host).where(Host.name == name).values(heartbeat_at=func.now()))


def list_live_hosts(session: Session) -> list[Host]:
    silent = func.now() - timedelta(seconds=get_settings().host_timeout_s)
    return list(session.scalars(select(Host).where(Host.heartbeat_at > silent).order_by(Host.name)))
