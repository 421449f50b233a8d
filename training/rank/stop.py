"""Why a run should stop before its end: a signal, or a supervisor that is gone. Light: it is there before torch is."""

import signal
from types import FrameType
from typing import Protocol

from training.rundir import RunDir

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Asked between forward passes; once there is a reason it stays."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self.reason: str | None = None

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as a wish to stop. A second one changes nothing: the checkpoint is written anyway."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def asked(self) -> bool:
        if self.reason is None and self._run_dir.supervisor_is_gone():
            self.reason = "the supervisor is gone"
        return self.reason is not None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or f"asked by {signal.Signals(number).name}"


class Ranks(Protocol):
    """Of `Group`, which needs torch, what is needed here."""

    def any(self, wish: bool) -> bool: ...

    def gather(self, value: str | None) -> list[str | None]: ...


class AgreedStop:
    """The same answer on all ranks, whichever of them was asked to stop; all ask at the same places."""

    def __init__(self, own: Stop, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self.reason: str | None = None

    def asked(self) -> bool:
        if self.reason is None and self._ranks.any(self._own.asked()):
            self.reason = next(filter(None, self._ranks.gather(self._own.reason)))
        return self.reason is not None
