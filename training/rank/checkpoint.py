"""Checkpoints: everything that a run needs to go on as if it had never been interrupted."""

import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import SpecError
from training.rank.copies import bring
from training.rank.group import Group
from training.rank.parallel import Parallel
from training.rank.random_state import RandomState
from training.rank.source import Source
from training.rank.weights import read_weights, save_weights, weights_name
from training.retention import choose_expired, find_needed
from training.rundir import RunDir, checkpoint_name, commit_folder, read_manifest, step_of

STATE = "state.pt"
FORMAT = 1
"""How a checkpoint is laid out, in its manifest; raised with each change that makes earlier ones unreadable."""


@dataclass
class Progress:
    """How far a run is; all of it is told to people, and all of it outlives an interruption."""

    step: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    seconds: float = 0.0
    steps_s: float = 0.0
    "Of the seconds those in optimizer steps."
    flops: float = 0.0
    "Computed in training: forward passes, gradients, what was computed twice; not evaluations."
    peak_s: float = 0.0
    "How long the model's own operations would have taken at the device's peak; MFU is this over `steps_s`."
    train_loss: float | None = None
    eval_loss: float | None = None
    evaluated_step: int = 0
    best_step: int | None = None
    "Of early stopping: the step with the lowest validation loss; its checkpoint becomes the result."
    best_eval_loss: float | None = None
    last_gain_loss: float | None = None
    evaluations_without_gain: int = 0
    recent_losses: list[float] = field(default_factory=list)
    "Of the last steps that changed the weights: what a spike is measured against."
    way_back_step: int | None = None
    "Where the run may go back: the step of the newest checkpoint that the plan asked for, not that of an interruption."
    skips_in_a_row: int = 0
    rate_factor: float = 1.0
    "Halved each time that the run goes back."
    rolled_back_steps: list[int] = field(default_factory=list)
    "The steps that made it go back."

    @property
    def spent(self) -> tuple[float, float, float, float]:
        """What going back does not give back: seconds and operations."""
        return self.seconds, self.steps_s, self.flops, self.peak_s

    @spent.setter
    def spent(self, value: tuple[float, float, float, float]) -> None:
        self.seconds, self.steps_s, self.flops, self.peak_s = value


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
        """Raises SpecError for a checkpoint that this version cannot read, and for that of another job, which would be
        gone on with and overwritten."""
        manifest = read_manifest(checkpoint)
        if manifest.get("format") != FORMAT:
            raise SpecError(
                f"{self.run_dir.path}: its checkpoints were written by another version, from which this one cannot go "
                f"on; choose another run directory, and name checkpoints/{checkpoint.name} in resume_from to start "
                "with its weights",
                code="other_version",
            )
        if manifest["fingerprint"] != self.fingerprint:
            raise SpecError(
                f"{self.run_dir.path}: its checkpoints are of another job (spec, data or base model differ); "
                "choose another run directory",
                code="other_run",
            )

    def bring(self, checkpoint: Path, group: Group) -> Path:
        """Where this rank can read it. All ranks call it."""
        return bring(checkpoint, group, self.run_dir.received)

    def save(self, parallel: Parallel, progress: Progress) -> dict[str, Any]:
        """Write a checkpoint of the step that is done, on rank 0; its manifest."""
        weights = parallel.gather_weights()
        # Ranks that are at work on the same rows have the same.
        random = dict(reversed(parallel.group.gather((parallel.random_rank, RandomState.take().as_dict()))))
        state = {"optimizer": parallel.optimizer_state(), "random": [random[rank] for rank in sorted(random)]}
        return parallel.group.first(lambda: self._write(parallel.model, weights, state, progress))

    def _write(
        self, model: nn.Module, weights: dict[str, Tensor], state: dict[str, Any], progress: Progress
    ) -> dict[str, Any]:
        self.clear()
        target = self.run_dir.checkpoints / checkpoint_name(progress.step)
        beside = target.with_name(f".{target.name}")
        save_weights(model, weights, self.tokenizer, self.source, beside / weights_name(model))
        torch.save(state, beside / STATE)
        about: dict[str, Any] = {
            "format": FORMAT,
            "attempt": self.attempt,
            "fingerprint": self.fingerprint,
            "progress": asdict(progress),
        }
        manifest = commit_folder(beside, target, about)
        self._remove_expired(find_needed(about["progress"]))
        return manifest

    def clear(self) -> None:
        """Remove what a killed writer left beside."""
        self.run_dir.checkpoints.mkdir(exist_ok=True)
        for leftover in self.run_dir.checkpoints.glob(".step-*"):
            shutil.rmtree(leftover)

    def _remove_expired(self, needed: set[int]) -> None:
        folders = {step_of(folder): folder for folder in self.run_dir.list_checkpoints()}
        for step in choose_expired({step: _eval_loss(folder) for step, folder in folders.items()}, self.limit, needed):
            # Renamed first: whoever looks at it finds a whole checkpoint, or none.
            gone = folders[step].with_name(f".{folders[step].name}")
            folders[step].rename(gone)
            shutil.rmtree(gone)


def load_progress(checkpoint: Path, progress: Progress) -> None:
    saved = read_manifest(checkpoint)["progress"]
    for name in (entry.name for entry in fields(Progress)):
        # What a checkpoint of an older version does not know of is as at the start.
        setattr(progress, name, saved.get(name, getattr(Progress(), name)))


def load_state(checkpoint: Path, parallel: Parallel) -> None:
    """Put back optimizer and random numbers. A rank that the checkpoint does not know goes on with those it has."""
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True, mmap=parallel.group.ranks > 1)
    parallel.load_optimizer_state(state["optimizer"])
    if parallel.random_rank < len(state["random"]):
        RandomState(**state["random"][parallel.random_rank]).restore()


def load_weights(parallel: Parallel, source: Source, checkpoint: Path) -> None:
    """Put the trained weights of a checkpoint in the place of the model's."""
    folder = checkpoint / weights_name(parallel.model)
    parallel.load_weights(read_weights(parallel.model, source, folder))


def go_back(checkpoint: Path, parallel: Parallel, progress: Progress, source: Source) -> None:
    """Make a run in mid-training what it was when the checkpoint was written."""
    load_weights(parallel, source, checkpoint)
    load_state(checkpoint, parallel)
    load_progress(checkpoint, progress)


def _eval_loss(checkpoint: Path) -> float | None:
    """The validation loss of a checkpoint whose step was evaluated."""
    progress = read_manifest(checkpoint)["progress"]
    loss: float | None = progress["eval_loss"] if progress["evaluated_step"] == progress["step"] else None
    return loss
