"""/healthz: the process answers. /readyz: so do the database and the broker."""

import logging
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from api.errors import RETRY_AFTER_S, make_answer
from api.schemas import Health
from store.queue import ping_broker
from store.session import ping_database

log = logging.getLogger(__name__)

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def is_alive() -> Health:
    """Takes no thread: true also while all of them are busy."""
    return Health()


@router.get("/readyz", response_model=dict[str, str])
def is_ready() -> Response:
    checks = {"database": ping_database, "broker": ping_broker}
    down = [name for name, ping in checks.items() if not _answers(name, ping)]
    if down:
        message = f"not ready: {' and '.join(f'the {name} does not answer' for name in down)}"
        return make_answer(503, message, code="not_ready", headers={"Retry-After": str(RETRY_AFTER_S)})
    return JSONResponse({"status": "ok", **dict.fromkeys(checks, "ok")})


def _answers(name: str, ping: Callable[[], object]) -> bool:
    """Whatever keeps a part from answering makes it down; the log says what."""
    try:
        ping()
    except Exception as bad:
        log.warning("the %s does not answer: %s", name, bad)
        return False
    return True
