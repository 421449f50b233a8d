"""What `resume_from` of a job names: a checkpoint or the result of an earlier job of the same project."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.errors import InvalidRequestError
from store.models import Artifact, Checkpoint, Job
from store.status import JobStatus
from training.adapter import Adapter
from training.spec import JobSpec

PARAM = "resume_from"


@dataclass(frozen=True)
class Start:
    job: Job
    "That made the weights."
    files: dict[str, tuple[str, str]]
    "Path -> object key, sha256; the result of a job is one archive."


def check_start(session: Session, project_id: str, spec: JobSpec) -> None:
    """The checkpoint is locked, so that it is not removed before the job that needs it is committed.

    Raises:
        InvalidRequestError: there is no such thing, or its weights do not fit what the job asks.
    """
    if spec.resume_from is None:
        return
    start = find_start(session, project_id, spec.resume_from)
    if start.job.model != spec.model:
        message = f"{PARAM}: {spec.resume_from} was trained on {start.job.model}, not on {spec.model}"
        raise _wrong(f"{message}; name {start.job.model} as the model", code="start_does_not_fit")
    made = Adapter.model_validate(start.job.spec.get("adapter", {}))
    if made.init == "pissa":
        message = f"{PARAM}: {spec.resume_from} was made with adapter.init pissa"
        raise _wrong(f"{message}, which is not offered to start from yet", code="start_does_not_fit")
    asks = spec.adapter.shape
    for name, was in made.shape.items():
        if was != (asked := asks[name]):
            message = f"{PARAM}: {spec.resume_from} was made with adapter.{name} {was}, this job asks for {asked}"
            raise _wrong(f"{message}; set adapter.{name} to {was}", code="start_does_not_fit")


def find_start(session: Session, project_id: str, reference: str) -> Start:
    """Raises InvalidRequestError where there is nothing of this name, or it is gone."""
    if reference.startswith("ftckpt-"):
        found = _find_checkpoint(session, project_id, reference)
    elif reference.startswith("ft:"):
        found = _find_result(session, project_id, reference)
    else:
        message = f"{PARAM}: {reference[:80]!r} is neither a checkpoint (ftckpt-...) nor a fine-tuned model (ft:...)"
        raise _wrong(message, code="start_not_found")
    if found is None:
        raise _wrong(f"{PARAM}: there is no {reference[:200]!r}, or it is not kept any more", code="start_not_found")
    return found


def list_waited_for(session: Session, checkpoint_ids: list[str]) -> set[str]:
    """Those of the checkpoints from which jobs start that have not ended."""
    ended = [status for status in JobStatus if status.is_final]
    reference = Job.spec[PARAM].astext
    query = select(reference).where(Job.status.not_in(ended), reference.in_(checkpoint_ids))
    return set(session.scalars(query))


def _find_checkpoint(session: Session, project_id: str, checkpoint_id: str) -> Start | None:
    query = select(Checkpoint, Job).join(Job, Job.id == Checkpoint.job_id)
    query = query.where(Checkpoint.id == checkpoint_id, Job.project_id == project_id)
    found = session.execute(query.with_for_update(read=True, of=Checkpoint)).one_or_none()
    return Start(found.Job, _list_files(found.Checkpoint)) if found else None


def _find_result(session: Session, project_id: str, name: str) -> Start | None:
    query = select(Artifact, Job).join(Job, Job.id == Artifact.job_id)
    found = session.execute(query.where(Job.fine_tuned_model == name, Job.project_id == project_id)).one_or_none()
    if found is None:
        return None
    archive = found.Artifact
    return Start(found.Job, {f"{archive.kind}.zip": (archive.object_key, archive.sha256)})


def _list_files(checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    """The weights; the state of the earlier job's optimizer stays where it is."""
    files: list[dict[str, Any]] = checkpoint.manifest["files"]
    return {
        file["name"]: (f"{checkpoint.object_prefix}/{file['name']}", file["sha256"])
        for file in files
        if file["name"].startswith(("adapter/", "model/"))
    }


def _wrong(message: str, *, code: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=PARAM, code=code)
