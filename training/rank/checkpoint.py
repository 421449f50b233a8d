"""Checkpoints: everything that a run needs to go on as if it had never been interrupted."""

import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.errors import SpecError
from training.rank.model import load_model
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState
from training.rank.source import Source
from training.rank.weights import is_adapted, load_adapter, save_weights, weights_name
from training.retention import choose_expired
from training.rundir import RunDir, checkpoint_name, commit_folder, read_manifest, step_of

STATE = "state.pt"


@dataclass
class Progress:
    """How far a run is; all of it is told to people, and all of it outlives an interruption."""

    step: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    seconds: float = 0.0
    train_loss: float | None = None
    eval_loss: float | None = None
    evaluated_step: int = 0
    best_step: int | None = None
    "Of early stopping: the step with the lowest validation loss; its checkpoint becomes the result."
    best_eval_loss: float | None = None
    last_gain_loss: float | None = None
    evaluations_without_gain: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. `fingerprint` says whose they are."""

    run_dir: RunDir
    fingerprint: str
    attempt: int
    tokenizer: Any
    source: Source
    limit: int

    def require_own(self, checkpoint: Path) -> None:
        """Raises SpecError for the checkpoint of another job, which would be gone on with and overwritten."""
        if read_manifest(checkpoint)["fingerprint"] != self.fingerprint:
            raise SpecError(
                f"{self.run_dir.path}: its checkpoints are of another job (spec, data or base model differ); "
                "choose another run directory",
                code="other_run",
            )

    def save(self, parallel: Parallel, progress: Progress) -> dict[str, Any]:
        """Write a checkpoint of the step that is done; its manifest."""
        self.clear()
        target = self.run_dir.checkpoints / checkpoint_name(progress.step)
        beside = target.with_name(f".{target.name}")
        save_weights(parallel.model, self.tokenizer, self.source, beside / weights_name(parallel.model))
        state = {"optimizer": parallel.optimizer_state(), "random": RandomState.take().as_dict()}
        torch.save(state, beside / STATE)
        about = {"attempt": self.attempt, "fingerprint": self.fingerprint, "progress": asdict(progress)}
        manifest = commit_folder(beside, target, about)
        self._remove_expired()
        return manifest

    def clear(self) -> None:
        """Remove what a killed writer left beside."""
        self.run_dir.checkpoints.mkdir(exist_ok=True)
        for leftover in self.run_dir.checkpoints.glob(".step-*"):
            shutil.rmtree(leftover)

    def _remove_expired(self) -> None:
        folders = {step_of(folder): folder for folder in self.run_dir.list_checkpoints()}
        for step in choose_expired({step: _eval_loss(folder) for step, folder in folders.items()}, self.limit):
            # Renamed first: whoever looks at it finds a whole checkpoint, or none.
            gone = folders[step].with_name(f".{folders[step].name}")
            folders[step].rename(gone)
            shutil.rmtree(gone)


def load_progress(checkpoint: Path, progress: Progress) -> None:
    saved = read_manifest(checkpoint)["progress"]
    for field in fields(Progress):
        # What a checkpoint of an older version does not know of is as at the start.
        setattr(progress, field.name, saved.get(field.name, getattr(Progress(), field.name)))


def load_checkpoint(checkpoint: Path, parallel: Parallel) -> None:
    """Put back adapter, optimizer and random numbers; weights of a full fine-tune were read in place of the base."""
    if is_adapted(parallel.model):
        load_adapter(parallel.model, checkpoint / weights_name(parallel.model))
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    parallel.load_optimizer_state(state["optimizer"])
    RandomState(**state["random"]).restore()


def load_weights(model: nn.Module, source: Source, checkpoint: Path) -> None:
    """Put the trained weights of a checkpoint in the place of the model's."""
    folder = checkpoint / weights_name(model)
    if is_adapted(model):
        load_adapter(model, folder)
    else:
        load_model(model, source, folder)


def _eval_loss(checkpoint: Path) -> float | None:
    """The validation loss of a checkpoint whose step was evaluated."""
    progress = read_manifest(checkpoint)["progress"]
    loss: float | None = progress["eval_loss"] if progress["evaluated_step"] == progress["step"] else None
    return loss
