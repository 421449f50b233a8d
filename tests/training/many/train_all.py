"""What torchrun starts: several runs one after the other, each on all ranks. To start the ranks takes longer than to
train tiny models. Argument: a JSON file with a list of cases (ranks.py)."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from tests.training.tiny_runs import StopAtCheck, in_double
from training.rank.group import find_rank
from training.rank.run import run
from training.rank.stop import Stop
from training.rundir import RunDir


def main(cases: Path) -> None:
    rank, _ = find_rank()
    for number, case in enumerate(json.loads(cases.read_text())):
        run_dir = RunDir(Path(case["path"]))
        asked = case["stop_rank"] == rank
        with in_double() if case["double"] else nullcontext():
            code = run(run_dir, case["attempt"], StopAtCheck(run_dir, case["stop_check"]) if asked else Stop(run_dir))
        cases.with_name(f"code-{number}-{rank}").write_text(str(code))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
