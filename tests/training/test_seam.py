"""Events and folders, the seam between a run and whoever follows it: whole or not at all, whatever dies when."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.events import EventLog, finite, read_events
from training.rundir import RunDir, checkpoint_name, commit_folder, read_manifest, verify, write_json


def test_events_are_numbered_on_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for attempt in (1, 2):
        log = EventLog(path, attempt)
        log.append("metrics", 1, {"train_loss": 1.5})
        log.append("metrics", 2, {"note": "line\u2028end\nü"})
        log.close()
    events, end = read_events(path, 0)
    assert [(event.seq, event.attempt, event.step) for event in events] == [(1, 1, 1), (2, 1, 2), (3, 2, 1), (4, 2, 2)]
    assert events[1].data["note"] == "line\u2028end\nü"
    assert end == path.stat().st_size


def test_a_line_without_its_end_waits_and_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 1)
    log.append("metrics", 1)
    log.close()
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"seq": 2, "at": 1')
    assert read_events(path, 0)[1] == whole
    assert read_events(path, whole) == ([], whole)
    EventLog(path, 2).append("started", 0)
    assert [event.seq for event in read_events(path, 0)[0]] == [1, 2]


def test_a_tailing_reader_sees_each_event_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 1)
    seen, offset = [], 0
    for step in range(50):
        log.append("metrics", step)
        if step % 7 == 0:
            events, offset = read_events(path, offset)
            seen += [event.step for event in events]
    events, offset = read_events(path, offset)
    assert seen + [event.step for event in events] == list(range(50))


def test_numbers_that_are_not_finite_are_null_and_named() -> None:
    data = finite({"a": math.nan, "b": math.inf, "c": 1.0, "d": "x"})
    assert data == {"a": None, "b": None, "c": 1.0, "d": "x", "non_finite": ["a", "b"]}
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def make_checkpoint(run: RunDir, step: int) -> Path:
    beside = run.checkpoints / f".{checkpoint_name(step)}"
    (beside / "adapter").mkdir(parents=True)
    (beside / "adapter" / "w").write_bytes(b"w" * 1000)
    (beside / "state.pt").write_bytes(b"s" * 10)
    target = run.checkpoints / checkpoint_name(step)
    commit_folder(beside, target, {"step": step})
    return target


def test_a_manifest_names_every_file_with_size_and_sum(tmp_path: Path) -> None:
    target = make_checkpoint(RunDir(tmp_path), 3)
    names = {entry["name"]: entry["bytes"] for entry in read_manifest(target)["files"]}
    assert names == {"adapter/w": 1000, "state.pt": 10}
    assert verify(target) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest cut", "manifest odd"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    run = RunDir(tmp_path)
    good, bad = make_checkpoint(run, 3), make_checkpoint(run, 7)
    weights = bad / "adapter" / "w"
    match damage:
        case "flip":
            weights.write_bytes(b"w" * 500 + b"v" + b"w" * 499)
        case "cut":
            weights.write_bytes(b"w" * 999)
        case "gone":
            weights.unlink()
        case "manifest cut":
            (bad / "manifest.json").write_bytes((bad / "manifest.json").read_bytes()[:40])
        case "manifest odd":
            (bad / "manifest.json").write_text('{"files": 3}')
    assert run.find_resume_point() == good
    assert [path.name for path in run.checkpoints.iterdir()].count(f"{checkpoint_name(7)}.bad") == 1
    assert run.list_checkpoints() == [good]


KILLED_AT = """
import os, sys
from pathlib import Path
from training import rundir
calls, limit = [0], int(sys.argv[2])
def count(function):
    def counted(*arguments, **options):
        calls[0] += 1
        if calls[0] == limit:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return counted
os.fsync, Path.rename, Path.replace = count(os.fsync), count(Path.rename), count(Path.replace)
sys.path.insert(0, os.getcwd())
from tests.training.test_seam import make_checkpoint
make_checkpoint(rundir.RunDir(Path(sys.argv[1])), 7)
print(calls[0])
"""


def test_a_writer_killed_at_any_sync_or_rename_leaves_the_old_checkpoint_or_the_whole_new_one(tmp_path: Path) -> None:
    def write(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED_AT, str(folder), str(limit)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    (tmp_path / "whole").mkdir()
    calls = int(write(tmp_path / "whole", 0).stdout)
    assert calls >= 6
    for limit in range(1, calls + 1):
        run = RunDir(tmp_path / str(limit))
        old = make_checkpoint(run, 3)
        assert write(run.path, limit).returncode == -9
        found = run.find_resume_point()
        assert found is not None
        assert found == old or found.name == checkpoint_name(7)
        assert verify(found) is None
        assert not list(run.checkpoints.glob("*.bad")), "nothing half done was ever listed"


def test_json_is_written_whole_over_the_old(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_supervisor_is_gone_when_its_heartbeat_is_old_and_only_if_there_was_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not run.supervisor_is_gone()
    run.touch_heartbeat()
    assert not run.supervisor_is_gone()
    old = time.time() - 301
    os.utime(run.heartbeat, (old, old))
    assert run.supervisor_is_gone()
