"""The processes of `up`: started one after the other, started again when they die, ended together."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cli.errors import SetupError
from cli.keep import Kept

LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A process that has lived for so long counts as healthy: after it the pauses begin anew."""


@dataclass
class _Member:
    name: str
    run: Callable[[], Kept]
    kept: Kept | None
    started_at: float
    failures: int = 0
    next_try_at: float = 0.0


class Crew:
    """`tell` takes one line for people; `run` starts a process and returns once it may be relied on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._members: dict[str, _Member] = {}

    def start(self, name: str, run: Callable[[], Kept]) -> None:
        self._members[name] = _Member(name, run, run(), time.monotonic())

    def is_running(self, name: str) -> bool:
        kept = self._members[name].kept
        return kept is not None and kept.poll() is None

    def look_after(self) -> None:
        """Start again what has died, after a pause that doubles with each death. To be called often."""
        for member in self._members.values():
            if member.kept is None and time.monotonic() >= member.next_try_at:
                self._start_again(member)
            elif member.kept is not None and (status := member.kept.poll()) is not None:
                self._note_death(member, f"ended with status {status}{_name_log(member.kept)}")

    def end(self, *names: str) -> None:
        """End these at the same time and wait until they are gone."""
        leaving = [member.kept for name in names if (member := self._members.pop(name, None)) and member.kept]
        for kept in leaving:
            kept.ask_to_end()
        for kept in leaving:
            kept.end()

    def _start_again(self, member: _Member) -> None:
        try:
            member.kept, member.started_at = member.run(), time.monotonic()
        except SetupError as bad:
            self._note_death(member, bad.message)
        else:
            self._tell(f"{member.name} runs again")

    def _note_death(self, member: _Member, reason: str) -> None:
        lived_s = time.monotonic() - member.started_at
        member.failures = 1 if member.kept and lived_s > STEADY_S else member.failures + 1
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (member.failures - 1))
        member.kept, member.next_try_at = None, time.monotonic() + pause_s
        self._tell(f"{member.name} {reason}; it is started again in {pause_s:.0f} s")


def _name_log(kept: Kept) -> str:
    return f"; its log: {kept.log}" if kept.log is not None else ""
