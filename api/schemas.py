"""The shapes of answers: those of the OpenAI API, and beside them fields of ours that its clients pass through."""

from datetime import datetime
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel

from store.base_models import BaseModel as BaseModelEntry
from store.models import File
from training.rows import RowIssue

T = TypeVar("T")


class ErrorBody(BaseModel):
    message: str
    type: Literal["invalid_request_error", "authentication_error", "server_error"]
    param: str | None
    "JSON path of the field at fault."
    code: str
    "A stable word; docs/errors.md lists them."


class ErrorAnswer(BaseModel):
    error: ErrorBody


class ListAnswer(BaseModel, Generic[T]):
    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None

    @classmethod
    def of(cls, items: list[Any], has_more: bool) -> Self:
        ids = [item.id for item in items]
        return cls(data=items, has_more=has_more, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)


class FileAnswer(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed", "error"]
    status_details: str | None
    expires_at: None = None
    sha256: str

    @classmethod
    def of(cls, file: File) -> Self:
        problem = _first_problem(file.report or {})
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=seconds_of(file.created_at),
            filename=file.filename,
            purpose=file.purpose,
            status="error" if problem else "processed",
            status_details=problem,
            sha256=file.sha256,
        )


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class RowProblem(BaseModel):
    line: int
    "Line in the file, counted from 1; 0 where the file as a whole is meant."
    path: str
    code: str
    message: str


class Labels(BaseModel):
    """What kto reads: rows labelled true and false, and the first row that is neither."""

    desirable: int
    undesirable: int
    fault: RowProblem | None


class ReportAnswer(BaseModel):
    object: Literal["file.report"] = "file.report"
    file_id: str
    format: str | None
    rows: int
    errors: list[RowProblem]
    "The first ones; `error_count` counts all."
    error_count: int
    warnings: list[RowProblem]
    labels: Labels | None = None
    tokens: None = None

    @classmethod
    def of(cls, file: File) -> Self:
        return cls(file_id=file.id, **(file.report or {}))


class ModelAnswer(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "burnish"

    @classmethod
    def of(cls, model: BaseModelEntry) -> Self:
        return cls(id=model.name, created=model.created_at)


class Health(BaseModel):
    status: Literal["ok"] = "ok"


def seconds_of(at: datetime) -> int:
    return int(at.timestamp())


def _first_problem(report: dict[str, Any]) -> str | None:
    if not report.get("errors"):
        return None
    first = RowIssue(**report["errors"][0])
    return str(first) if first.line else first.message
