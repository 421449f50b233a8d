"""A crew starts what died again, with growing pauses, and ends everything."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from cli import crew as crew_module
from cli.crew import Crew
from cli.errors import SetupError
from cli.keep import Kept, keep
from tests.cli.processes import list_running, wait_until


def test_what_died_is_told_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    crew = Crew(told.append)
    crew.start("sleeper", lambda: keep(("sleep", "311"), log=tmp_path / "log.txt"))
    wait_until(lambda: len(list_running("sleep", "311")) == 1)
    first = list_running("sleep", "311")[0]
    first.kill()
    watch_until(crew, lambda: told and told[-1] == "sleeper runs again")
    assert told[0].startswith("sleeper ended with status 137; its log: ")
    assert told[0].endswith("it is started again in 1 s")
    wait_until(lambda: [one.pid for one in list_running("sleep", "311")] not in ([], [first.pid]))
    crew.end("sleeper")
    assert list_running("sleep", "311") == []


def test_the_pause_doubles_with_each_death_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(crew_module.time, "monotonic", lambda: now)
    told: list[str] = []
    starts: list[float] = []

    def fails() -> Kept:
        starts.append(now)
        if len(starts) > 1:
            raise SetupError("does not start")
        kept = keep(("false",), log=tmp_path / "log.txt")
        kept.wait()
        return kept

    crew = Crew(told.append)
    crew.start("failing", fails)
    while len(starts) < 9:
        crew.look_after()
        now += 0.5
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_ending_ends_all_at_the_same_time(tmp_path: Path) -> None:
    crew = Crew(print)
    slow = ("sh", "-c", "trap 'sleep 0.5; exit' TERM; echo ready; while :; do sleep 0.05; done")
    for name in ("one", "two", "three"):
        crew.start(name, lambda name=name: keep(slow, log=tmp_path / name))
    wait_until(lambda: all("ready" in (tmp_path / name).read_text() for name in ("one", "two", "three")))
    started = time.monotonic()
    crew.end("one", "two", "three")
    assert time.monotonic() - started < 1.4


def watch_until(crew: Crew, condition: Callable[[], object]) -> None:
    def look() -> bool:
        crew.look_after()
        return bool(condition())

    wait_until(look)
