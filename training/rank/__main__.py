"""`python -m training.rank DIR --attempt N`: one rank of a run. Everything it needs stands in DIR/spec.json, and where
there are several, in the environment that torchrun gives it."""

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path

from training.errors import SpecError
from training.rank.stop import Stop
from training.rundir import EXIT_FAILED, RunDir
from training.spec import load_spec


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.rank", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--base-name", help="what the adapter calls its base; otherwise what the spec names")
    parser.add_argument("--plan-only", action="store_true", help="write plan.json and end; the weights are not read")
    asked = parser.parse_args()
    run_dir = RunDir(asked.run_dir.resolve())
    stop = Stop(run_dir)
    # Before torch is imported, which takes seconds: a signal in that time is not lost.
    stop.listen()
    # What started it asks where it stands, before it ends it.
    faulthandler.register(signal.SIGUSR1)
    if not _needs_bitsandbytes(run_dir):
        # peft loads it where it is installed, and with it torch's compiler: seconds.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    from training.rank.run import run

    try:
        return run(run_dir, asked.attempt, stop, base_name=asked.base_name, plan_only=asked.plan_only)
    except BlockingIOError:
        print(f"error: another process is at work in {run_dir.path}; wait for it or stop it", file=sys.stderr)
        return EXIT_FAILED


def _needs_bitsandbytes(run_dir: RunDir) -> bool:
    try:
        return load_spec(run_dir.spec).needs_bitsandbytes
    except SpecError:  # the run finds it again, and tells it
        return False


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed. Taking torch down object by object would hold the devices for another second.
    os._exit(code)
