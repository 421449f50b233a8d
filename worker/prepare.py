"""Makes the run directory of an attempt ready: data, the newest checkpoint, and the spec with local paths in it."""

import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

from store import artifacts
from store.attempts import RunInput
from store.base_models import BaseModel, find_model
from training.errors import BurnishError, Fault
from training.retention import find_needed
from training.rundir import MANIFEST, RunDir, checkpoint_name, file_sha256, step_of, verify, write_json

log = logging.getLogger(__name__)


class PrepareError(BurnishError):
    """The host could not get together what the run needs."""

    code = "prepare_failed"
    fault: Fault = "infrastructure"
    retryable = True


def prepare_run(run: RunDir, inputs: RunInput) -> BaseModel:
    """Fill the run directory; what is there already and whole is kept. Returns the base model as this host has it.

    Raises:
        PrepareError: a file or checkpoint did not arrive whole.
        BurnishError: this host does not know the model.
    """
    data = run.path / "data"
    local = {name: _fetch_file(data / name, name, key, sha256) for name, (key, sha256) in inputs.files.items()}
    if inputs.start:
        local["resume_from"] = _fetch_start(run, inputs.start)
    _fetch_checkpoint(run, inputs)
    model = find_model(str(inputs.spec["model"]))
    write_json(run.spec, {**inputs.spec, **local, "model": model.reference})
    return model


def clear_run(run: RunDir) -> None:
    """Remove what a job that has ended does not need on this host any more; its events and its log stay."""
    for folder in (run.path / "data", run.path / "start", run.checkpoints, run.adapter, run.model):
        shutil.rmtree(folder, ignore_errors=True)
    for archive in run.path.glob("*.zip"):
        archive.unlink()


def _fetch_start(run: RunDir, files: dict[str, tuple[str, str]]) -> str:
    """The weights of an earlier job, as a folder that holds `adapter/` or `model/`."""
    folder = run.path / "start"
    for name, (key, sha256) in files.items():
        target = Path(_fetch_file(folder / name, name, key, sha256))
        if target.suffix == ".zip":
            with zipfile.ZipFile(target) as archive:
                archive.extractall(folder / target.stem)
    return str(folder)


def _fetch_file(target: Path, name: str, key: str, sha256: str) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or file_sha256(target) != sha256:
        artifacts.get_file(key, target)
        if file_sha256(target) != sha256:
            raise PrepareError(f"{name}: the bytes in the object store are not those that were uploaded")
    return str(target)


def _fetch_checkpoint(run: RunDir, inputs: RunInput) -> None:
    """Bring the newest stored checkpoint that is whole, unless one as new is here."""
    here = run.find_resume_point()
    for step, prefix, manifest in inputs.checkpoints:
        if here is not None and step_of(here) >= step:
            return
        if _download_checkpoint(run, step, prefix, manifest):
            _fetch_needed(run, inputs, manifest)
            return
        log.warning("checkpoint %s is damaged in the object store; the one before it is tried", prefix)


def _fetch_needed(run: RunDir, inputs: RunInput, newest: dict[str, Any]) -> None:
    """Earlier checkpoints that the run may come back to. One that does not arrive is missed by the run itself."""
    needed = find_needed(newest.get("progress", {}))
    for step, prefix, manifest in inputs.checkpoints:
        if step in needed and not (run.checkpoints / checkpoint_name(step)).exists():
            _download_checkpoint(run, step, prefix, manifest)


def _download_checkpoint(run: RunDir, step: int, prefix: str, manifest: dict[str, Any]) -> bool:
    beside = run.checkpoints / f".{checkpoint_name(step)}.part"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name in [*(entry["name"] for entry in manifest["files"]), MANIFEST]:
            path = Path(beside / name)
            path.parent.mkdir(parents=True, exist_ok=True)
            artifacts.get_file(f"{prefix}/{name}", path)
    except FileNotFoundError:
        shutil.rmtree(beside)
        return False
    if verify(beside) is not None:
        shutil.rmtree(beside)
        return False
    beside.rename(run.checkpoints / checkpoint_name(step))
    return True
