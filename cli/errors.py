"""What keeps the command line from doing its work, told with what to do."""

from training.errors import BurnishError, Fault


class SetupError(BurnishError):
    """Something of this machine: a port, a folder, a missing program, a server that does not start."""

    code = "setup_failed"
    fault: Fault = "infrastructure"
