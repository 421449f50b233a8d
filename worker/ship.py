"""Brings checkpoints and adapters into the object store, then makes them exist by their rows."""

import zipfile
from pathlib import Path

from store import artifacts, runs
from store.runs import add_artifact, add_checkpoint, is_stored
from store.session import open_session
from training.rundir import MANIFEST, RunDir, file_sha256, read_manifest, step_of

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold: archives of equal content are equal bytes."""


def ship_checkpoint(job_id: str, number: int, folder: Path) -> None:
    """Files first, the manifest after them, the row last. One that is stored already is left as it is."""
    step = step_of(folder)
    prefix = f"jobs/{job_id}/checkpoints/{number}/{step}"
    manifest = read_manifest(folder)
    with open_session() as session:
        if is_stored(session, job_id, step, manifest):
            return
    for name in [*(entry["name"] for entry in manifest["files"]), MANIFEST]:
        artifacts.put_file(f"{prefix}/{name}", folder / name)
    progress = manifest["progress"]
    evaluated = progress["evaluated_step"] == step
    metrics = {"train_loss": progress["train_loss"], "eval_loss": progress["eval_loss"] if evaluated else None}
    with open_session() as session:
        add_checkpoint(session, job_id, number, step, prefix, manifest, metrics)


def expire_checkpoints(job_id: str, number: int) -> None:
    """Rows first, then the bytes of all that have no row: also of those that a killed supervisor did not come to."""
    with open_session() as session:
        kept = runs.expire_checkpoints(session, job_id, number)
    prefix = f"jobs/{job_id}/checkpoints"
    for key in list(artifacts.list_keys(f"{prefix}/")):
        attempt, step = key.removeprefix(f"{prefix}/").split("/")[:2]
        # A later attempt may be at work by now, and its uploads get their rows last.
        if int(attempt) <= number and f"{prefix}/{attempt}/{step}" not in kept:
            artifacts.delete(key)


def ship_result(job_id: str, number: int, run: RunDir) -> None:
    """The adapter, or the model of a full fine-tuning, as one archive."""
    kind, folder = ("model", run.model) if run.model.exists() else ("adapter", run.adapter)
    archive = run.path / f"{kind}.zip"
    write_archive(folder, archive)
    key = f"jobs/{job_id}/{kind}/{number}.zip"
    artifacts.put_file(key, archive)
    with open_session() as session:
        add_artifact(session, job_id, number, kind, key, archive.stat().st_size, file_sha256(archive))


def write_archive(folder: Path, archive: Path) -> None:
    """All files of a folder but its manifest, stored and not compressed (weights do not shrink), ordered by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _EPOCH)
            entry.external_attr = 0o644 << 16
            with path.open("rb") as source, target.open(entry, "w", force_zip64=True) as written:
                while piece := source.read(artifacts.CHUNK_BYTES):
                    written.write(piece)
