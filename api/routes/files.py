"""/v1/files: upload, list, look at, download, delete; and the row report of an upload."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from api.deps import MAX_PAGE, ProjectId
from api.downloads import make_download
from api.openapi import UPLOAD_BODY
from api.schemas import FileAnswer, FileDeleted, ListAnswer, ReportAnswer
from api.uploads import Upload, receive_upload
from store import files
from store.session import open_session

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("", openapi_extra={"requestBody": UPLOAD_BODY})
def create_file(project: ProjectId, upload: Annotated[Upload, Depends(receive_upload, scope="function")]) -> FileAnswer:
    with open_session() as session:
        file = files.create_file(
            session,
            project,
            upload.path,
            filename=upload.filename,
            purpose=upload.purpose,
            size_bytes=upload.size_bytes,
            sha256=upload.sha256,
            report=upload.report,
        )
    return FileAnswer.of(file)


@router.get("")
def list_files(
    project: ProjectId,
    after: str | None = None,
    # The OpenAI API takes this much; a page holds fewer, which its clients see by has_more.
    limit: Annotated[int, Query(ge=1, le=10_000)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> ListAnswer[FileAnswer]:
    size = min(limit, MAX_PAGE)
    newest_first = order == "desc"
    with open_session() as session:
        page = files.list_files(session, project, after=after, limit=size, newest_first=newest_first, purpose=purpose)
    return ListAnswer.of([FileAnswer.of(file) for file in page.items], page.has_more)


@router.get("/{file_id}")
def get_file(project: ProjectId, file_id: str) -> FileAnswer:
    with open_session() as session:
        return FileAnswer.of(files.get_file(session, project, file_id))


@router.delete("/{file_id}")
def delete_file(project: ProjectId, file_id: str) -> FileDeleted:
    with open_session() as session:
        object_key = files.delete_file(session, project, file_id)
    files.delete_bytes(object_key)
    return FileDeleted(id=file_id)


@router.get("/{file_id}/content", response_class=Response)
@router.head("/{file_id}/content", include_in_schema=False)
def download_file(request: Request, project: ProjectId, file_id: str) -> Response:
    with open_session() as session:
        file = files.get_file(session, project, file_id)
    return make_download(
        request,
        file.object_key,
        size_bytes=file.bytes,
        sha256=file.sha256,
        filename=file.filename,
        media_type="application/octet-stream",
    )


@router.get("/{file_id}/report")
def get_report(project: ProjectId, file_id: str) -> ReportAnswer:
    with open_session() as session:
        return ReportAnswer.of(files.get_file(session, project, file_id))
