"""Which checkpoints are kept, in the run directory and in the object store alike."""

from collections.abc import Mapping
from typing import Any


def choose_expired(losses: Mapping[int, float | None], limit: int, needed: set[int]) -> list[int]:
    """The steps to remove so that `limit` checkpoints are left; `losses` holds the validation loss of each step, where
    there is one. The newest, the best and the `needed` ones are never removed, also where `limit` is 1."""
    if not losses:
        return []
    kept = {max(losses), *(needed & losses.keys())}
    evaluated = [(loss, step) for step, loss in losses.items() if loss is not None]
    if evaluated:
        kept.add(min(evaluated)[1])
    for step in sorted(losses, reverse=True):
        if len(kept) >= limit:
            break
        kept.add(step)
    return sorted(losses.keys() - kept)


def find_needed(progress: Mapping[str, Any]) -> set[int]:
    """The steps of the checkpoints that a run, so far, may come back to: the best of early stopping, and the one that
    it would go back to after a bad step."""
    steps = (progress.get("best_step"), progress.get("way_back_step"))
    return {step for step in steps if step is not None}
