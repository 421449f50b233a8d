"""Checkpoints: everything that a run needs to go on as if it had never been interrupted."""

import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from training.errors import SpecError
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState
from training.rank.source import Source
from training.rank.weights import is_adapted, load_adapter, save_weights, weights_name
from training.rundir import RunDir, checkpoint_name, commit_folder, read_manifest

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


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. `fingerprint` says whose they are."""

    run_dir: RunDir
    fingerprint: str
    attempt: int
    tokenizer: Any
    source: Source

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
        return commit_folder(beside, target, about)

    def clear(self) -> None:
        """Remove what a killed writer left beside."""
        self.run_dir.checkpoints.mkdir(exist_ok=True)
        for leftover in self.run_dir.checkpoints.glob(".step-*"):
            shutil.rmtree(leftover)


def load_progress(checkpoint: Path, progress: Progress) -> None:
    saved = read_manifest(checkpoint)["progress"]
    for field in fields(Progress):
        setattr(progress, field.name, saved[field.name])


def load_checkpoint(checkpoint: Path, parallel: Parallel) -> None:
    """Put back adapter, optimizer and random numbers; weights of a full fine-tune were read in place of the base."""
    if is_adapted(parallel.model):
        load_adapter(parallel.model, checkpoint / weights_name(parallel.model))
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    parallel.load_optimizer_state(state["optimizer"])
    RandomState(**state["random"]).restore()
