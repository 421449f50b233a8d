"""The OpenAPI document: what FastAPI finds, and the bodies that routes read by themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.deps import PUBLIC_PATHS
from api.schemas import ErrorAnswer
from store.files import PURPOSE
from training.spec import JobSpec

_REFERENCE = "#/components/schemas/{model}"

JOB_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="JobSpec")}}},
}
UPLOAD_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary", "description": "JSON lines, one example a line"},
                    "purpose": {"type": "string", "enum": [PURPOSE]},
                },
            }
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "What the caller can mend"},
    "5XX": {"model": ErrorAnswer, "description": "What the service has to mend; 503 says when to try again"},
}


def add_document(app: FastAPI) -> None:
    def make_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            schema = JobSpec.model_json_schema(ref_template=_REFERENCE)
            document["components"]["schemas"] |= {**schema.pop("$defs"), "JobSpec": schema}
            for path in PUBLIC_PATHS:
                document["paths"][path]["get"].pop("security")
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = make_document  # type: ignore[method-assign]
