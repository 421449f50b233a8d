"""The script for GPU hosts, where there is none: it says so, and what it makes of its runs holds on the CPU too."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_gpu.py", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import check_gpu

    return check_gpu


def test_without_a_gpu_it_says_so_and_ends_with_77() -> None:
    done = call()
    assert done.returncode == 77, done.stderr
    assert "no GPU" in done.stdout
    assert "torch" not in done.stderr


def test_rehearsed_its_runs_come_to_their_end(tmp_path: Path) -> None:
    done = call("--rehearse", "--only", "fp32 lora", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok      numbers: fp32 lora" in done.stdout
    assert done.stdout.splitlines()[-1] == "all well"


def test_a_run_that_fails_is_told_with_its_reason(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script.Bench(tmp_path, rehearse=True)
    body = bench.make_body("nothing", "supervised", {})
    table = script.Table()
    table.tell("broken", lambda: str(bench.run("broken", body)))
    assert table.failed == 1
    told = capsys.readouterr().out
    assert told.startswith("FAILED  broken")
    assert "nothing" in told, "the model that is not there"


@pytest.mark.parametrize(
    ("found", "fails"),
    [
        ({1: (2.0, 1.0)}, False),
        ({1: (2.019, 1.0)}, False),
        ({1: (2.021, 1.0)}, True),
        ({1: (2.0, 1.06)}, True),
        ({1: (float("nan"), 1.0)}, True),
        ({}, True),
        ({1: (2.0, 1.0), 2: (2.0, 1.0)}, True),
    ],
)
def test_a_curve_beyond_the_tolerance_is_broken(
    found: dict[int, tuple[float, float]], fails: bool, script: ModuleType
) -> None:
    if fails:
        with pytest.raises(script.Broken):
            script.compare(found, {1: (2.0, 1.0)}, (0.01, 0.05))
    else:
        assert "loss within" in script.compare(found, {1: (2.0, 1.0)}, (0.01, 0.05))


def test_a_saver_that_saves_nothing_is_broken(script: ModuleType) -> None:
    peaks = {"plain": 100, "offloading": 50, "checkpointing": 60, "both savers": 40}
    assert "offloading" in script.check_saving(peaks)
    for name, peak in {"offloading": 100, "checkpointing": 101, "both savers": 70}.items():
        with pytest.raises(script.Broken, match="saves nothing"):
            script.check_saving({**peaks, name: peak})
    with pytest.raises(script.Broken, match="missing"):
        script.check_saving({"plain": 1})
