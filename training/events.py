"""What a run tells: JSON lines with a growing `seq`, written by rank 0 and tailed by whoever follows."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

EventType = Literal[
    "started", "plan", "metrics", "evaluated", "checkpoint", "warning",
    "early_stopped", "finished", "failed", "stopped",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl; `at` is the writer's clock in seconds, for display only: order is `seq`."""

    seq: int
    at: float
    attempt: int
    type: EventType
    step: int
    data: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """Appends events to a file, whole lines only, going on after the last `seq` that stands there.

    A line that a killed writer left unfinished is cut off first, so that no two events run together.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        events, end = read_events(path, 0) if path.exists() else ([], 0)
        self._file = path.open("ab")
        self._file.truncate(end)
        self._attempt = attempt
        self._seq = events[-1].seq if events else 0

    def append(self, type: EventType, step: int, data: Mapping[str, Any] | None = None) -> Event:
        self._seq += 1
        event = Event(self._seq, time.time(), self._attempt, type, step, finite(data or {}))
        self._file.write(json.dumps(asdict(event), allow_nan=False, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        return event

    def close(self) -> None:
        self._file.close()


class Untold:
    """Of ranks whose events nobody reads, since rank 0 tells the same."""

    def append(self, type: EventType, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Likewise."""


def read_events(path: Path, offset: int) -> tuple[list[Event], int]:
    """The complete lines from byte `offset` on, and the offset after them; a last line without its end waits."""
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read()
    end = chunk.rfind(b"\n") + 1
    return [Event(**json.loads(line)) for line in chunk[:end].split(b"\n") if line], offset + end


def finite(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with numbers that are not finite as null and their names under `non_finite`: JSON has no NaN."""
    bad = sorted(name for name, value in data.items() if isinstance(value, float) and not math.isfinite(value))
    if not bad:
        return dict(data)
    return {**{name: None if name in bad else value for name, value in data.items()}, "non_finite": bad}
