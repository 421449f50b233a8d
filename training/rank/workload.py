"""What a window of rows costs to train: the passes that the method makes over it, in FLOPs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from training.adapter import Adapter
from training.facts import Matmuls
from training.flops import NOTHING, Load, Work, count_references, count_training, make_load, virtual_places
from training.plan import Plan
from training.rank.data import Labelled, Pair, Trained, sequences_of
from training.rank.kto import make_mismatched
from training.rank.loss import NO_LABEL, count_trained
from training.rank.passes import Pass, PassLimit, Row, share_passes
from training.rank.sieve import Example


@dataclass(frozen=True)
class Workload:
    matmuls: Matmuls
    plan: Plan
    adapter: Adapter

    def of_window(self, rows: Sequence[Trained], limit: PassLimit) -> Work:
        """All passes of a step on all ranks, those over the reference among them. A pass that does not count is done,
        and not needed."""
        kto = self.plan.method == "kto"
        passes = _share(rows, limit, self.plan.data)
        others = _share(make_mismatched(cast(Sequence[Labelled], rows)), limit, self.plan.data) if kto else []
        counted, idle = (
            self._count(
                [part.rows for part in passes if part.counts == counts],
                [part.rows for part in others if part.counts == counts],
            )
            for counts in (True, False)
        )
        return Work(counted.done + idle.done, counted.needed)

    def _count(self, parts: Sequence[Sequence[Trained]], others: Sequence[Sequence[Example]]) -> Work:
        plan, passes = self.plan, list(_list_passes(self.plan.method, parts))
        return count_training(
            self.matmuls, self._load(passes), checkpointing=plan.gradient_checkpointing
        ) + count_references(
            plan.method,
            self.matmuls,
            self._load(passes, as_base=True),
            self._load(others, as_base=True),
            self._load(others),
        )

    def _load(self, passes: Sequence[Sequence[Example]], *, as_base: bool = False) -> Load:
        prefix, prompt = (0, 0) if as_base else virtual_places(self.adapter)
        kind = self.plan.attention
        loads = (
            make_load(map(used_tokens, rows), count_trained(rows), kind, prefix=prefix, prompt=prompt)
            for rows in passes
        )
        return sum(loads, NOTHING)


def used_tokens(row: Example) -> int:
    """Up to the place that predicts the last trained token; what follows is cut off before the pass."""
    return next((place for place in range(len(row.labels) - 1, 0, -1) if row.labels[place] != NO_LABEL), 0)


def _share(rows: Sequence[Row], limit: PassLimit, ranks: int) -> list[Pass[Row]]:
    return [part for own in share_passes(rows, limit, ranks) for part in own]


def _list_passes(method: str, parts: Sequence[Sequence[Trained]]) -> Iterator[Sequence[Example]]:
    for part in parts:
        if method == "dpo":
            pairs = cast(Sequence[Pair], part)
            yield [pair.chosen for pair in pairs]
            yield [pair.rejected for pair in pairs]
        else:
            yield sequences_of(part)
