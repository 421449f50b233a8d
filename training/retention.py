"""Which checkpoints are kept, in the run directory and in the object store alike."""

from collections.abc import Mapping


def choose_expired(losses: Mapping[int, float | None], limit: int) -> list[int]:
    """The steps to remove so that `limit` checkpoints are left; `losses` holds the validation loss of each step, where
    there is one. The newest and the best are never removed, also where `limit` is 1."""
    if not losses:
        return []
    kept = {max(losses)}
    evaluated = [(loss, step) for step, loss in losses.items() if loss is not None]
    if evaluated:
        kept.add(min(evaluated)[1])
    for step in sorted(losses, reverse=True):
        if len(kept) >= limit:
            break
        kept.add(step)
    return sorted(losses.keys() - kept)
