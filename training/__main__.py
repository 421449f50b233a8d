"""The engine by itself: `python -m training run | plan | validate`."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from training.errors import BurnishError
from training.launch import make_environment, run_alone, write_spec
from training.node import add_arguments, find_node
from training.rows import make_report
from training.rundir import EXIT_FAILED, EXIT_FINISHED, RunDir
from training.spec import load_spec


def main() -> int:
    asked = _make_parser().parse_args()
    try:
        if asked.command == "run":
            return _run(asked, RunDir(asked.run_dir.resolve()))
        if asked.command == "plan":
            return _plan(asked.spec)
        return _validate(asked.file)
    except BurnishError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_FAILED


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train; the same command again goes on from the last checkpoint")
    run.add_argument("spec", type=Path, help="a create body as JSON; model and files may be paths")
    run.add_argument("--run-dir", type=Path, required=True, help="where all that the run writes goes")
    run.add_argument("--quiet", action="store_true", help="print errors only")
    add_arguments(run)
    plan = commands.add_parser("plan", help="print the plan of a spec as JSON; nothing is trained")
    plan.add_argument("spec", type=Path)
    validate = commands.add_parser("validate", help="print what is wrong with the rows of a file as JSON")
    validate.add_argument("file", type=Path)
    return parser


def _run(asked: argparse.Namespace, run_dir: RunDir) -> int:
    node = find_node(asked, load_spec(asked.spec).layout)
    write_spec(asked.spec, run_dir)
    if node is not None and node.rank > 0 and not asked.quiet:
        print(f"node {node.rank}: what happens is told at node 0, {node.place}; the log of this one is {run_dir.log}")
    return run_alone(run_dir, make_environment(os.environ), quiet=asked.quiet, node=node)


def _plan(spec: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="burnish-plan-") as folder:
        run_dir = RunDir(Path(folder))
        write_spec(spec, run_dir)
        code = run_alone(run_dir, make_environment(os.environ), plan_only=True)
        if code == EXIT_FINISHED:
            print(run_dir.plan.read_text("utf-8"))
        return code


def _validate(file: Path) -> int:
    """Exit code 0 only where every row is right."""
    try:
        report = make_report(file)
    except OSError as error:
        print(f"error: {file}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    return EXIT_FAILED if report.error_count else EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
