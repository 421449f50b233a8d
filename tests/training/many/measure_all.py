"""What torchrun starts: as train_all.py, with what each rank exchanged in each step, kept before it, and took while it
wrote a checkpoint, in a file beside."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.many.measuring import Traffic, count_kept_bytes, watching_memory
from training.rank import loop
from training.rank.checkpoint import Checkpoints
from training.rank.group import find_rank
from training.rank.parallel import Parallel
from training.rank.run import run
from training.rank.stop import Stop
from training.rundir import RunDir


def main(cases: Path) -> None:
    rank, ranks = find_rank()
    for number, case in enumerate(json.loads(cases.read_text())):
        told: dict[str, list[Any]] = {"exchanged": [], "kept": [], "seen": [], "saving": []}
        gc.collect()
        before = count_kept_bytes()  # libraries keep some of an earlier run
        with pytest.MonkeyPatch.context() as patch:
            _measure(patch, told, ranks)
            run_dir = RunDir(Path(case["path"]))
            code = run(run_dir, case["attempt"], Stop(run_dir))
        told["kept"] = [kept - before for kept in told["kept"]]
        (run_dir.path / f"measured-{rank}.json").write_text(json.dumps(told))
        cases.with_name(f"code-{number}-{rank}").write_text(str(code))


def _measure(patch: pytest.MonkeyPatch, told: dict[str, list[Any]], ranks: int) -> None:
    take_step, measure, save = loop.take_step, loop.measure, Checkpoints.save

    def counted_step(of: loop.Run) -> bool:
        with Traffic(ranks) as traffic:
            done = take_step(of)
        told["exchanged"].append(traffic.bytes)
        told["seen"].append(traffic.seen)
        return done

    def weighed_window(*arguments: Any) -> Any:
        measured = measure(*arguments)
        told["kept"].append(count_kept_bytes())  # gradients are there, activations are not
        return measured

    def watched_save(checkpoints: Checkpoints, parallel: Parallel, *more: Any) -> Any:
        with watching_memory() as found:
            manifest = save(checkpoints, parallel, *more)
        told["saving"].append(found["most"])
        return manifest

    patch.setattr(loop, "take_step", counted_step)
    patch.setattr(loop, "measure", weighed_window)
    patch.setattr(Checkpoints, "save", watched_save)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
