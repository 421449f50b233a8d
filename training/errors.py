"""The errors that the engine tells to people; every other room derives from the same family."""

from typing import Any, Literal

Fault = Literal["data", "config", "capacity", "infrastructure", "bug"]


class BurnishError(Exception):
    """A failure that is told to a person: what was wrong, where, and what to do.

    `param` is the JSON path of the field at fault, `code` a stable word that is listed in the docs.
    """

    code = "internal_error"
    fault: Fault = "bug"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between the ranks of a run."""
        return _remake, (type(self), self.message, self.param, self.code)

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "param": self.param,
            "fault": self.fault,
            "retryable": self.retryable,
        }


def _remake(kind: type[BurnishError], message: str, param: str | None, code: str) -> BurnishError:
    return kind(message, param=param, code=code)


class SpecError(BurnishError):
    """A field of the job that the caller can mend."""

    code = "invalid_value"
    fault: Fault = "config"


class DataError(BurnishError):
    """A row of a data file that the caller can mend; the message begins with its place."""

    code = "invalid_data"
    fault: Fault = "data"


class ModelError(BurnishError):
    """A base model that is missing, unreadable, or not fit for the job."""

    code = "invalid_model"
    fault: Fault = "config"


class CapacityError(BurnishError):
    """The device does not hold what the job needs."""

    code = "out_of_memory"
    fault: Fault = "capacity"


class TrainingError(BurnishError):
    """The run itself went wrong, such as a loss that is not finite."""

    code = "training_failed"
    fault: Fault = "config"


class RankDiedError(BurnishError):
    """One of the processes of a run ended without a word, or did not answer the others."""

    code = "rank_died"
    fault: Fault = "infrastructure"
    retryable = True


class StorageError(BurnishError):
    """The disk of the run directory is full or fails; the same job may well run elsewhere or later."""

    code = "disk_full"
    fault: Fault = "infrastructure"
    retryable = True
