"""What holds for each exchange: a request id, an answer whatever happens, and one that arrives."""

import logging
import re
import secrets

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import make_fault_answer

log = logging.getLogger(__name__)

DRAIN_S = 30.0

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIds:
    """Gives each answer an `x-request-id`, the client's own where it sent a sane one, and each unforeseen error a 500
    that names it; the traceback goes to the log only."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _make_request_id(Headers(scope=scope).get("x-request-id"))
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.info("%s: the client went away in the middle of its request", request_id)
        except Exception:
            log.exception("%s: %s %r failed", request_id, scope["method"], scope["path"])
            if has_begun:
                raise  # The server cuts the connection, so that the client sees that the rest is missing.
            await make_fault_answer(request_id)(scope, receive, send_with_id)


class EarlyAnswers:
    """Makes an answer arrive that is given before the request's body was read, such as a refusal by size or key.

    A server that closes a connection with unread data on it resets it, and the client may lose the answer. So the
    answer goes out, then a bounded rest of the body is read and dropped, then the connection is closed.
    """

    def __init__(self, app: ASGIApp, drain_bytes: int) -> None:
        self.app = app
        self.drain_bytes = drain_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self.drain_bytes)
        await self.app(scope, exchange.receive, exchange.send)


class _Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, drain_bytes: int) -> None:
        self._receive, self._send, self._drain_bytes = receive, send, drain_bytes
        self._has_ended = False
        # Whoever asks before sending will not send a body that was refused.
        self._is_waiting_to_send = "expect" in Headers(scope=scope)

    async def receive(self) -> Message:
        self._is_waiting_to_send = False
        message = await self._receive()
        self._has_ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if self._has_ended:
            await self._send(message)
        elif message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        elif message.get("more_body", False) or self._is_waiting_to_send:
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            await self._drain()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self) -> None:
        left = self._drain_bytes
        with anyio.move_on_after(DRAIN_S):
            while left > 0 and not self._has_ended:
                left -= len((await self.receive()).get("body", b""))


def _make_request_id(asked: str | None) -> str:
    return asked if asked and _SANE_ID.fullmatch(asked) else f"req-{secrets.token_hex(12)}"


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
