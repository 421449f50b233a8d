"""The curve of a job, as columns of one length."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from store.models import Metric


@dataclass(frozen=True)
class Curve:
    """`columns` holds `step` and each name, null where a name has no finite value at that step; `non_finite` the steps
    where it was NaN or infinite; `attempts` the first step of each attempt."""

    columns: dict[str, list[Any]]
    non_finite: dict[str, list[int]]
    attempts: dict[int, int]
    steps_total: int


def read_curve(
    session: Session,
    job_id: str,
    *,
    names: list[str] | None,
    from_step: int | None,
    to_step: int | None,
    max_points: int | None,
) -> Curve:
    """All steps from `from_step` to `to_step`, both inclusive, thinned to about `max_points` without losing a spike."""
    query = select(Metric.step, Metric.attempt, Metric.data).where(Metric.job_id == job_id).order_by(Metric.step)
    if from_step is not None:
        query = query.where(Metric.step >= from_step)
    if to_step is not None:
        query = query.where(Metric.step <= to_step)
    rows = list(session.execute(query))
    total = session.scalar(select(func.count()).select_from(Metric).where(Metric.job_id == job_id)) or 0
    known = sorted({name for row in rows for name in row.data} - {"non_finite"})
    wanted = known if names is None else names
    non_finite = {
        name: steps
        for name in wanted
        if (steps := [row.step for row in rows if name in row.data.get("non_finite", ())])
    }
    attempts: dict[int, int] = {}
    for row in rows:
        attempts.setdefault(row.attempt, row.step)
    kept = _thin(rows, wanted, max_points)
    columns = {"step": [row.step for row in kept], **{name: [row.data.get(name) for row in kept] for name in wanted}}
    return Curve(columns, non_finite, attempts, total)


def _thin(rows: list[Row[Any]], names: list[str], max_points: int | None) -> list[Row[Any]]:
    """Of each bucket of steps keep the rows with the least and the greatest value of each name, and the ends."""
    if max_points is None or len(rows) <= max_points:
        return rows
    buckets = max(1, (max_points - 2) // max(2, 2 * len(names)))
    kept = {0, len(rows) - 1}
    for number in range(buckets):
        bucket = range(number * len(rows) // buckets, (number + 1) * len(rows) // buckets)
        for name in names:
            valued = [i for i in bucket if isinstance(rows[i].data.get(name), (int, float))]
            if valued:
                kept |= {
                    min(valued, key=lambda i: rows[i].data[name]),
                    max(valued, key=lambda i: rows[i].data[name]),
                }
    return [rows[i] for i in sorted(kept)]
