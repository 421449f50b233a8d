"""/v1/fine_tuning/jobs: create, list, look at, cancel; events, checkpoints, metrics and what was trained."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Depends, Header, Query, Request, Response

from api.deps import JsonBody, Paging, ProjectId
from api.downloads import make_download
from api.job_schemas import CheckpointAnswer, EventAnswer, JobAnswer, MetricsAnswer
from api.openapi import JOB_BODY
from api.schemas import ListAnswer
from store import base_models, events, jobs, metrics, queue, runs
from store.errors import InvalidRequestError, NotFoundError
from store.session import open_session
from training.spec import parse_spec

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])


def read_is_retry(x_stainless_retry_count: Annotated[str, Header()] = "0") -> bool:
    """Clients made by Stainless count their own repetitions of a call."""
    return bool(re.fullmatch(r"0*[1-9][0-9]*", x_stainless_retry_count))


def read_metadata(request: Request) -> dict[str, str] | None:
    """`metadata[key]=value`, as often as wanted, the way the openai client writes it."""
    asked = {}
    for name, value in request.query_params.multi_items():
        if match := re.fullmatch(r"metadata\[([^\]]*)\]", name):
            asked[match[1]] = value
    return asked or None


def read_names(names: Annotated[list[str] | None, Query()] = None) -> list[str] | None:
    """Comma-separated, or given several times."""
    if names is None:
        return None
    found = list(dict.fromkeys(name.strip() for part in names for name in part.split(",")))
    if bad := [name for name in found if not re.fullmatch(r"[a-z0-9_]{1,64}", name)]:
        raise InvalidRequestError(f"names: {bad[0][:80]!r} is not the name of a metric", param="names")
    return [name for name in found if name != "step"]


@router.post("", openapi_extra={"requestBody": JOB_BODY})
def create_job(
    project: ProjectId,
    body: JsonBody,
    background: BackgroundTasks,
    is_retry: Annotated[bool, Depends(read_is_retry)],
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> JobAnswer:
    if body is None:
        raise InvalidRequestError("the body is empty; send the job as a JSON object", code="invalid_body")
    spec = parse_spec(body)
    base_models.find_model(spec.model)
    with open_session() as session:
        job = jobs.create_job(session, project, spec, idempotency_key=idempotency_key or None, is_retry=is_retry)
    background.add_task(queue.publish_outbox)
    return JobAnswer.of(job)


@router.get("")
def list_jobs(
    project: ProjectId, page: Paging, metadata: Annotated[dict[str, str] | None, Depends(read_metadata)]
) -> ListAnswer[JobAnswer]:
    with open_session() as session:
        found = jobs.list_jobs(session, project, after=page.after, limit=page.limit, metadata=metadata)
    return ListAnswer.of([JobAnswer.of(job) for job in found.items], found.has_more)


@router.get("/{job_id}")
def get_job(project: ProjectId, job_id: str) -> JobAnswer:
    with open_session() as session:
        return JobAnswer.of(jobs.get_job(session, project, job_id))


@router.post("/{job_id}/cancel")
def cancel_job(project: ProjectId, job_id: str, background: BackgroundTasks, _body: JsonBody) -> JobAnswer:
    with open_session() as session:
        job = jobs.cancel_job(session, project, job_id)
    background.add_task(queue.publish_outbox)
    return JobAnswer.of(job)


@router.get("/{job_id}/events")
def list_events(project: ProjectId, job_id: str, page: Paging) -> ListAnswer[EventAnswer]:
    with open_session() as session:
        job = jobs.get_job(session, project, job_id)
        found = events.list_events(session, job.id, after=page.after, limit=page.limit)
    return ListAnswer.of([EventAnswer.of(event) for event in found.items], found.has_more)


@router.get("/{job_id}/checkpoints")
def list_checkpoints(project: ProjectId, job_id: str, page: Paging) -> ListAnswer[CheckpointAnswer]:
    with open_session() as session:
        job = jobs.get_job(session, project, job_id)
        found = runs.list_checkpoints(session, job.id, after=page.after, limit=page.limit)
    return ListAnswer.of([CheckpointAnswer.of(checkpoint) for checkpoint in found.items], found.has_more)


@router.get("/{job_id}/metrics")
def get_metrics(
    project: ProjectId,
    job_id: str,
    names: Annotated[list[str] | None, Depends(read_names)],
    from_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    to_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    max_points: Annotated[int | None, Query(ge=2, le=1_000_000)] = None,
    x: Literal["step"] = "step",  # noqa: ARG001 - other axes are refused, not ignored
) -> MetricsAnswer:
    with open_session() as session:
        job = jobs.get_job(session, project, job_id)
        curve = metrics.read_curve(
            session, job.id, names=names, from_step=from_step, to_step=to_step, max_points=max_points
        )
    return MetricsAnswer.of(curve)


@router.get("/{job_id}/adapter", response_class=Response)
@router.head("/{job_id}/adapter", include_in_schema=False)
def download_adapter(
    request: Request,
    project: ProjectId,
    job_id: str,
    format: Literal["zip"] = "zip",  # noqa: ARG001 - other formats are refused, not ignored
) -> Response:
    return _download_result(request, project, job_id, "adapter")


@router.get("/{job_id}/model", response_class=Response)
@router.head("/{job_id}/model", include_in_schema=False)
def download_model(
    request: Request,
    project: ProjectId,
    job_id: str,
    format: Literal["zip"] = "zip",  # noqa: ARG001 - as above
) -> Response:
    """The weights of a full fine-tuning."""
    return _download_result(request, project, job_id, "model")


def _download_result(request: Request, project: str, job_id: str, kind: Literal["adapter", "model"]) -> Response:
    with open_session() as session:
        job = jobs.get_job(session, project, job_id)
        found = runs.find_artifact(session, job.id, kind)
        other = runs.find_artifact(session, job.id, "model" if kind == "adapter" else "adapter")
    if found is None:
        message = f"{job.id} has no {kind}: it is {job.status.value}"
        if other is not None:
            message = f"{job.id} made no {kind} but {other.kind}: GET /v1/fine_tuning/jobs/{job.id}/{other.kind}"
        raise NotFoundError(message, code="result_not_found" if job.status.is_final else "result_not_ready")
    return make_download(
        request,
        found.object_key,
        size_bytes=found.bytes,
        sha256=found.sha256,
        filename=f"{job.id}-{kind}.zip",
        media_type="application/zip",
    )
