"""The web service as an ASGI application: `uvicorn api.main:app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import Depends, FastAPI

from api.deps import authenticate, refuse_nul
from api.errors import add_error_handlers
from api.middleware import EarlyAnswers, RequestIds
from api.openapi import ERRORS, add_document
from api.routes import files, health, jobs, models
from api.uploads import remove_stale_uploads
from store.settings import get_settings

DRAIN_BYTES = 32 * 2**20


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    await anyio.to_thread.run_sync(remove_stale_uploads)
    yield


def make_app() -> FastAPI:
    app = FastAPI(
        title="Burnish",
        version="1",
        summary="Fine-tuning on your own GPUs: the OpenAI fine-tuning API, and what it lacks.",
        dependencies=[Depends(authenticate), Depends(refuse_nul)],
        responses=ERRORS,
        lifespan=_lifespan,
        docs_url=None,  # Their pages load scripts from elsewhere; /openapi.json is there for tools.
        redoc_url=None,
        redirect_slashes=False,
    )
    for part in (health, files, jobs, models):
        app.include_router(part.router)
    add_error_handlers(app)
    add_document(app)
    app.add_middleware(RequestIds)
    # A file somewhat above the limit is read to its end, so that its sender certainly gets the answer.
    app.add_middleware(EarlyAnswers, drain_bytes=get_settings().max_upload_bytes + DRAIN_BYTES)
    return app


app = make_app()
