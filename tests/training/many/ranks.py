"""Runs on several ranks, many in one start of torchrun, and how they compare with one process."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny_runs import curve_of, weights_of
from training.rundir import RunDir, checkpoint_name, write_json

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TRAINING = Path(__file__).with_name("train_all.py")

ALL = os.environ.get("TEST_ALL") == "1"
"""`make test-all`: every job with every strategy, and not one of each kind. It takes twice the time."""

LOSS, NORM, WEIGHTS = 1e-6, 5e-6, 2e-4
"""How far rounding takes two ranks from one, relative, and for weights to the largest of them. A wrong divisor is
seen as 1e-1."""


def on_ranks(body: dict[str, Any], ranks: int, strategy: str, **more: int) -> dict[str, Any]:
    """Or a pipeline of so many ranks."""
    spread = {"pipeline": ranks} if strategy == "pipeline" else {"strategy": strategy, "data": ranks}
    return {**body, "parallelism": {**spread, **more}}


@dataclass(frozen=True)
class Case:
    """An attempt at a run; it may be stopped by one rank that is asked to at its n-th check."""

    path: Path
    body: dict[str, Any]
    attempt: int = 1
    stop_rank: int | None = None
    stop_check: int = 0
    double: bool = False
    "In the place of fp32 everything is computed in fp64."


def train_on_ranks(folder: Path, ranks: int, cases: Sequence[Case], script: Path = TRAINING) -> list[list[int]]:
    """All cases in their order, in one start; of each the exit codes of all ranks."""
    for case in cases:
        case.path.mkdir(exist_ok=True, parents=True)
        write_json(RunDir(case.path).spec, case.body)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        listed = Path(place) / "cases.json"
        write_json(listed, [{**asdict(case), "path": str(case.path)} for case in cases])
        start_ranks(ranks, script, listed)
        codes = [[listed.with_name(f"code-{number}-{rank}") for rank in range(ranks)] for number in range(len(cases))]
        return [[int(file.read_text()) for file in files] for files in codes]


def on_nodes(body: dict[str, Any], nodes: int, ranks: int, strategy: str) -> dict[str, Any]:
    return {**on_ranks(body, ranks, strategy), "resources": {"nodes": nodes}}


def train_on_two_nodes(folder: Path, ranks: int, cases: Sequence[Case]) -> list[list[int]]:
    """As `train_on_ranks`, with half of the ranks on each of two nodes. A case's path is under `node-0` of the folder;
    node 1 has a directory of the same name under `node-1`, and where the system allows it does not see the other."""
    port, started = find_port(), []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for node in range(2):
            listed = []
            for case in cases:
                path = folder / f"node-{node}" / case.path.relative_to(folder / "node-0")
                path.mkdir(exist_ok=True, parents=True)
                write_json(RunDir(path).spec, case.body)
                listed.append({**asdict(case), "path": str(path)})
            write_json(Path(place) / f"cases-{node}.json", listed)
        for node in range(2):
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks // 2}", "--nnodes=2"]
            meeting = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            command = [*torchrun, *meeting, str(TRAINING), str(Path(place) / f"cases-{node}.json")]
            hidden = hide(folder / "node-0") if node else []
            with (Path(place) / f"log-{node}").open("w") as log:
                started.append(subprocess.Popen([*hidden, *command], env=ENVIRONMENT, stdout=log, stderr=log))
        try:
            ended = [process.wait(560) for process in started]
        finally:
            for process in started:
                process.kill()
        assert ended == [0, 0], "".join((Path(place) / f"log-{node}").read_text()[-4000:] for node in range(2))
        codes = [[Path(place) / f"code-{number}-{rank}" for rank in range(ranks)] for number in range(len(cases))]
        return [[int(file.read_text()) for file in files] for files in codes]


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def hide(folder: Path) -> list[str]:
    """What a command begins with to see nothing in a folder; nothing where the system does not let it."""
    begin = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]
    try:
        can = subprocess.run([*begin, "true"], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        can = False
    return begin if can else []


def start_ranks(ranks: int, script: Path, *arguments: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [*torchrun, "--local-addr=127.0.0.1", str(script), *map(str, arguments)]
    made = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=560)
    assert made.returncode == 0, made.stderr[-8000:]


def assert_same_training(path: Path, want: Path, *, apart: Mapping[str, float] | None = None) -> None:
    """The curves of two runs, and what they made, but for rounding. Metrics may be `apart` by so much by name."""
    got_curve, want_curve = curve_of(path, with_flops=False), curve_of(want, with_flops=False)
    assert got_curve.keys() == want_curve.keys()
    for place, data in want_curve.items():
        got = got_curve[place]
        assert got.keys() == data.keys()
        for name, value in data.items():
            limit = (NORM if name == "grad_norm" else LOSS) * max(abs(value), 1e-3)
            assert abs(got[name] - value) <= max(limit, (apart or {}).get(name, 0.0)), (place, name, got[name], value)
    for result in ("adapter", "model"):
        if (want / result).exists():
            assert find_difference(path / result, want / result) <= WEIGHTS
            assert without_weights(path / result) == without_weights(want / result)


def find_difference(one: Path, other: Path) -> float:
    """Of the weights of two folders, against the largest of them."""
    a, b = weights_of(one), weights_of(other)
    assert {name: (w.shape, w.dtype) for name, w in a.items()} == {name: (w.shape, w.dtype) for name, w in b.items()}
    largest = max(float(weight.abs().max()) for weight in b.values())
    return max(float((a[name] - b[name]).abs().max()) for name in b) / largest


def assert_same_digits(path: Path, want: Path) -> None:
    """As `assert_same_training`, of runs in 64 bits: nothing is divided, counted or left out otherwise."""
    got_curve, want_curve = curve_of(path, with_flops=False), curve_of(want, with_flops=False)
    assert got_curve.keys() == want_curve.keys()
    for place, data in want_curve.items():
        assert got_curve[place] == pytest.approx(data, rel=1e-12, abs=1e-15), place
    result = name_result(want)
    assert {weight.dtype for weight in weights_of(want / result).values()} == {torch.float64}
    assert find_difference(path / result, want / result) < 1e-12


def assert_whole_checkpoints(path: Path, want: Path, steps: Sequence[int]) -> None:
    """They hold all weights of a result."""
    result = name_result(want)
    for step in steps:
        saved = path / "checkpoints" / checkpoint_name(step) / result
        assert weights_of(saved).keys() == weights_of(want / result).keys()


def name_result(path: Path) -> str:
    return "model" if (path / "model").exists() else "adapter"


def without_weights(folder: Path) -> dict[str, bytes]:
    """All that a folder holds beside, by name."""
    skipped = {"manifest.json"}
    files = (file for file in folder.iterdir() if file.suffix != ".safetensors" and file.name not in skipped)
    return {file.name: file.read_bytes() for file in files}
