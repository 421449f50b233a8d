"""What the store refuses, for rooms above to turn into answers."""

from training.errors import BurnishError, Fault


class NotFoundError(BurnishError):
    """No such thing, or not in this project: the two look the same."""

    code = "not_found"
    fault: Fault = "config"


class ConflictError(BurnishError):
    """The thing is in a state that does not allow what was asked."""

    code = "conflict"
    fault: Fault = "config"


class InvalidRequestError(BurnishError):
    """An argument beside the job's spec that the caller can mend."""

    code = "invalid_value"
    fault: Fault = "config"


class FencedError(BurnishError):
    """A write of an attempt that is no longer the job's current one. Whoever gets this has to end its processes."""

    code = "fenced"
    fault: Fault = "infrastructure"


class SettingError(BurnishError):
    """A setting of the service that its operator has to mend."""

    code = "invalid_setting"
    fault: Fault = "infrastructure"
