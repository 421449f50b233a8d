"""How the ranks of a run ended, told by their launchers, and which of them it was that ended the others."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from training.errors import RankDiedError
from training.rank.failure import was_left

HANGING_S = 10
"""After this time one that outlived the others, and had to be killed, is the one that they waited for."""


@dataclass(frozen=True)
class Failure:
    """Of a rank: its exit code, when, and what it said itself."""

    exit_code: int
    at: float
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """Of the ranks of a node. `ended_by` is what ended their launcher, where that was not a rank: a signal's name, or
    an error."""

    node: int
    failures: Mapping[int, Failure]
    ended_by: str | None = None

    def as_dict(self, now: float) -> dict[str, Any]:
        """Clocks of hosts differ: times become ages."""
        failures = {rank: [one.exit_code, now - one.at, one.told] for rank, one in self.failures.items()}
        return {"node": self.node, "failures": failures, "ended_by": self.ended_by}

    @classmethod
    def from_dict(cls, told: dict[str, Any], now: float) -> "Ending":
        failures = {
            int(rank): Failure(code, now - age_s, said) for rank, (code, age_s, said) in told["failures"].items()
        }
        return cls(told["node"], failures, told["ended_by"])


def read_failures(failures: Mapping[int, ProcessFailure]) -> dict[int, Failure]:
    """As torchrun hands them over."""
    return {
        rank: Failure(one.exitcode, float(one.timestamp), told if isinstance(told := one.error_file_data, dict) else {})
        for rank, one in failures.items()
    }


def explain_endings(
    endings: Sequence[Ending], lost: Sequence[int], local_ranks: int, nodes: int = 1
) -> tuple[int, dict[str, Any]]:
    """Step and error of what ended all: a node that is lost, or else the rank that failed first; those that were left
    waiting for it fail too, and come after it."""
    failures = {rank: failure for ending in endings for rank, failure in ending.failures.items()}
    step = max((failure.told.get("step", 0) for failure in failures.values()), default=0)
    if lost:
        first, last = lost[0] * local_ranks, (lost[0] + 1) * local_ranks - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        message = f"node {lost[0]} ({ranks}) is lost: nothing more is heard of it"
        died = RankDiedError(message, code="node_lost")
        return step, {**died.as_dict(), "rank": first, "node": lost[0]}
    broken = next((ending for ending in endings if ending.ended_by), None)
    if broken and all(was_left(failure.told) or failure.exit_code < 0 for failure in failures.values()):
        died = RankDiedError(f"the launcher of node {broken.node} was ended ({broken.ended_by})")
        return step, {**died.as_dict(), "node": broken.node}
    if not failures:
        return step, RankDiedError("the ranks ended without a word").as_dict()
    rank = min(failures, key=lambda rank: (was_left(failures[rank].told), failures[rank].at))
    failure, place = failures[rank], {"rank": rank}
    name = f"rank {rank}"
    if nodes > 1:
        place["node"] = rank // local_ranks
        name += f" (node {place['node']})"
    if "failure" not in failure.told:
        waited = any(other.at + HANGING_S < failure.at for other in failures.values())
        return step, {**RankDiedError(f"{name} {_tell_death(failure.exit_code, waited)}").as_dict(), **place}
    error = failure.told["failure"]
    everywhere = all(other.told.get("failure") == error for other in failures.values())
    message = error["message"] if everywhere else f"{name}: {error['message']}"
    return failure.told["step"], {**error, "message": message, **place}


def _tell_death(exit_code: int, waited: bool) -> str:
    if waited:
        return "did not answer the others in time; log.txt says where each rank stood"
    if exit_code == -signal.SIGKILL:
        return "was killed (SIGKILL); the system does this when memory runs out"
    return f"died of {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
