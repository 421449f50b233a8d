"""The shapes of answers about jobs: the job, its events, checkpoints and metrics."""

from typing import Any, Literal, Self

from pydantic import BaseModel

from api.schemas import seconds_of
from store.events import PREFIX as EVENT_PREFIX
from store.metrics import Curve
from store.models import Checkpoint, Event, Job
from store.status import JobStatus


class JobError(BaseModel):
    code: str
    message: str
    param: str | None
    fault: str | None = None
    retryable: bool = False
    log_excerpt: str | None = None


class OpenAIHyperparameters(BaseModel):
    """As asked; once there is a plan, its numbers."""

    n_epochs: int | float | str
    batch_size: int | str
    learning_rate_multiplier: float | str


class JobAnswer(BaseModel):
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: JobError | None
    fine_tuned_model: str | None
    finished_at: int | None
    hyperparameters: OpenAIHyperparameters
    model: str
    organization_id: str
    result_files: list[str] = []
    seed: int
    status: str
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    estimated_finish: int | None = None
    integrations: list[Any] = []
    metadata: dict[str, str] | None
    method: dict[str, Any]
    suffix: str | None
    spec: dict[str, Any]
    "The body as asked."
    plan: dict[str, Any] | None
    "Every automatic value resolved, with the reasons."
    desired_status: str | None
    "What was asked for and is not yet so, such as cancelled."
    attempt: int

    @classmethod
    def of(cls, job: Job) -> Self:
        has_ended = job.status.is_final
        return cls(
            id=job.id,
            created_at=seconds_of(job.created_at),
            error=JobError(**job.error) if job.error and job.status == JobStatus.FAILED else None,
            fine_tuned_model=job.fine_tuned_model if has_ended else None,
            finished_at=seconds_of(job.finished_at) if job.finished_at and has_ended else None,
            hyperparameters=_make_hyperparameters(job),
            model=job.model,
            organization_id=job.project_id,
            seed=job.seed,
            status=job.status.value,
            trained_tokens=job.trained_tokens if has_ended else None,
            training_file=job.training_file,
            validation_file=job.validation_file,
            metadata=job.spec.get("metadata"),
            method=_make_method(job),
            suffix=job.spec.get("suffix"),
            spec=job.spec,
            plan=job.plan,
            desired_status=job.desired_status.value if job.desired_status else None,
            attempt=job.attempt,
        )


class EventAnswer(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None
    attempt: int

    @classmethod
    def of(cls, event: Event) -> Self:
        return cls(
            id=f"{EVENT_PREFIX}{event.id}",
            created_at=seconds_of(event.created_at),
            level=event.level,
            message=event.message,
            type=event.type,
            data=event.data,
            attempt=event.attempt,
        )


class CheckpointAnswer(BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, Any]
    step_number: int
    attempt: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        return cls(
            id=checkpoint.id,
            created_at=seconds_of(checkpoint.created_at),
            fine_tuned_model_checkpoint=checkpoint.id,
            fine_tuning_job_id=checkpoint.job_id,
            metrics=_make_checkpoint_metrics(checkpoint),
            step_number=checkpoint.step,
            attempt=checkpoint.attempt,
        )


class MetricsAnswer(BaseModel):
    object: Literal["fine_tuning.job.metrics"] = "fine_tuning.job.metrics"
    columns: dict[str, list[Any]]
    "`step`, and each name in a list of the same length; null where a name has no finite value."
    non_finite: dict[str, list[int]]
    "By name, the steps where it was NaN or infinite."
    attempts: dict[int, int]
    "First step of each attempt."
    steps_total: int

    @classmethod
    def of(cls, curve: Curve) -> Self:
        return cls(
            columns=curve.columns,
            non_finite=curve.non_finite,
            attempts=curve.attempts,
            steps_total=curve.steps_total,
        )


def _make_hyperparameters(job: Job) -> OpenAIHyperparameters:
    asked, plan = _asked_hyperparameters(job), job.plan
    return OpenAIHyperparameters(
        n_epochs=_whole(plan["n_epochs"]) if plan else asked.get("n_epochs", "auto"),
        batch_size=plan["batch_size"] if plan else asked.get("batch_size", "auto"),
        learning_rate_multiplier=_find_multiplier(asked.get("learning_rate_multiplier", "auto"), plan),
    )


def _find_multiplier(asked: float | str, plan: dict[str, Any] | None) -> float | str:
    """Times the automatic rate, which an automatic multiplier leaves as it is."""
    return 1.0 if plan and asked == "auto" else asked


def _make_method(job: Job) -> dict[str, Any]:
    """As asked, also where the hyperparameters came in the old place of the OpenAI API."""
    kind = job.spec.get("method", {}).get("type", "supervised")
    return {"type": kind, kind: {"hyperparameters": _asked_hyperparameters(job)}}


def _asked_hyperparameters(job: Job) -> dict[str, Any]:
    """Read from the stored body itself, so that a job of an older version can always be shown."""
    method = job.spec.get("method", {})
    objective = method.get(method.get("type", "supervised")) or {}
    found: dict[str, Any] = objective.get("hyperparameters") or job.spec.get("hyperparameters") or {}
    return {name: _whole(value) if name == "n_epochs" else value for name, value in found.items()}


def _whole(epochs: float | str) -> float | str:
    """Epochs may be fractions here; the OpenAI client knows whole numbers, so those stay whole."""
    return int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs


def _make_checkpoint_metrics(checkpoint: Checkpoint) -> dict[str, Any]:
    """The run's own names, and the validation values under those of the OpenAI API too."""
    own = checkpoint.metrics
    theirs = {"full_valid_loss": own.get("eval_loss"), "full_valid_mean_token_accuracy": own.get("eval_token_accuracy")}
    return {**own, "step": checkpoint.step, **{name: value for name, value in theirs.items() if value is not None}}
