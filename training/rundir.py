"""The run directory: the seam between the one who starts a run and the run itself. docs/run-dir.md describes it."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
EXIT_FINISHED, EXIT_FAILED, EXIT_STOPPED = 0, 1, 3
"""How a rank and the launcher end. Any other code: the process was ended from outside."""

TIMEOUT_SETTING = "BURNISH_COLLECTIVE_TIMEOUT_S"
COLLECTIVE_TIMEOUT_S = 1800.0
"""How long ranks wait for each other before the run fails; a checkpoint has to be written in less."""

MEETING_SETTING = "BURNISH_RENDEZVOUS_TIMEOUT_S"
MEETING_TIMEOUT_S = 600.0
"""How long the nodes of a run wait for each other to be started."""

SILENCE_SETTING = "BURNISH_NODE_TIMEOUT_S"
SILENCE_TIMEOUT_S = 30.0
"""A node of which nothing was heard for so long is lost."""

HEARTBEAT_LIMIT_S = 300.0
"""A rank stops by itself, with a checkpoint, when its supervisor has not been heard of for so long."""


@dataclass(frozen=True)
class RunDir:
    """Names in a run directory. Writing is atomic: a file or folder is there whole or not at all."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def received(self) -> Path:
        """Copies of checkpoints of node 0, on the other nodes of a run, while it goes on."""
        return self.path / "received"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def touch_heartbeat(self) -> None:
        self.heartbeat.touch()

    def supervisor_is_gone(self, limit_s: float = HEARTBEAT_LIMIT_S) -> bool:
        """Whether a supervisor once watched this run and has been silent for too long; False when run alone."""
        try:
            return time.time() - self.heartbeat.stat().st_mtime > limit_s
        except FileNotFoundError:
            return False

    def list_checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first. Each was renamed into place after its manifest was on disk."""
        found = [path for path in self.checkpoints.glob("step-*") if path.suffix == "" and (path / MANIFEST).exists()]
        return sorted(found, key=step_of)

    def find_resume_point(self) -> Path | None:
        """The newest checkpoint whose files match its manifest. One that does not is set aside as `*.bad`."""
        for path in reversed(self.list_checkpoints()):
            if verify(path) is None:
                return path
            bad = path.with_name(path.name + ".bad")
            shutil.rmtree(bad, ignore_errors=True)
            path.rename(bad)
        return None


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all, and so that it survives a power cut."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def commit_folder(beside: Path, target: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a folder that was written beside its place into the real one: files synced, manifest last, then renamed.

    The manifest holds `about` and each file's name, size and sha256. A target that exists already is replaced.
    """
    files = sorted(path for path in beside.rglob("*") if path.is_file() and path.name != MANIFEST)
    manifest = {**about, "files": [_describe(path, beside) for path in files]}
    for path in files:
        _sync_file(path)
    for folder in sorted({path.parent for path in files} - {beside}):
        sync_folder(folder)
    write_json(beside / MANIFEST, manifest)
    if target.exists():
        shutil.rmtree(target)
    beside.rename(target)
    sync_folder(target.parent)
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    return read_json(folder / MANIFEST)


def verify(folder: Path) -> str | None:
    """What is wrong with a folder that has a manifest, or None where every file has its size and sha256."""
    try:
        manifest = read_manifest(folder)
        for entry in manifest["files"]:
            path = folder / entry["name"]
            if path.stat().st_size != entry["bytes"] or file_sha256(path) != entry["sha256"]:
                return f"{entry['name']} does not match its manifest"
    except (OSError, ValueError, KeyError, TypeError) as bad:
        return f"unreadable: {bad}"
    return None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _describe(path: Path, folder: Path) -> dict[str, Any]:
    return {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
