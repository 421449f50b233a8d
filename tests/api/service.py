"""Running the web service, and sending it a file."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI

from cli.starting import find_free_port

ROW = (
    '{"messages": [{"role": "user", "content": "How many legs has a spider?"}, {"role": "assistant", "content": "8"}]}'
)
ROW += "\n"


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """The address of an application that runs on a free port while the block does."""
    port = find_free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    limit = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive() and time.monotonic() < limit, "the service does not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def upload(http: httpx.Client, content: bytes | str = ROW * 2, name: str = "train.jsonl") -> httpx.Response:
    return http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"})
