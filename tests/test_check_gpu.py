"""The script for GPU hosts, where there is none: it says so, and what it makes of its runs holds on the CPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from training import spec
from training.errors import SpecError

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def call(*arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The script, and the JSON object that it wrote into the file that is named first."""
    command = ["scripts/gpu_check.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=580)
    return done, json.loads(Path(arguments[0]).read_text())


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture
def bench(scripts: None) -> ModuleType:
    import gpu_bench

    return gpu_bench


@pytest.fixture
def layouts(scripts: None) -> ModuleType:
    import gpu_layouts

    return gpu_layouts


@pytest.fixture
def numbers(scripts: None) -> ModuleType:
    import gpu_numbers

    return gpu_numbers


@pytest.mark.timeout(600)
def test_without_a_gpu_it_rehearses_and_ends_with_77(tmp_path: Path) -> None:
    only = ("numbers: fp32 lora", "layouts: ddp on 2, fp32 lora", "speed: full sdpa ddp")
    done, told = call(str(tmp_path / "out.json"), *(word for part in only for word in ("--only", part)))
    assert done.returncode == 77, done.stdout + done.stderr
    assert "no GPU" in done.stdout and "rehearsal" in done.stdout
    assert "ok      numbers: fp32 lora" in done.stdout
    assert (told["verdict"], told["rehearsal"], told["host"]["gpus"]) == ("ok", True, [])
    assert told["host"]["torch"] == torch.__version__
    checks = {check["name"]: check for check in told["checks"]}
    assert [(name, check["verdict"]) for name, check in checks.items()] == [
        ("numbers: fp32 lora", "ok"),
        ("layouts: ddp on 2, fp32 lora", "ok"),
        ("speed: full sdpa ddp on 2", "ok"),
    ]
    apart = checks["layouts: ddp on 2, fp32 lora"]["numbers"]
    assert apart["ranks"] == 2
    assert apart["loss"] <= 1e-6 and apart["grad_norm"] <= 5e-6 and 0 < apart["weights"] <= 2e-4
    (row,) = told["table"]
    assert (row["adapter"], row["strategy"], row["ranks"]) == ("full", "ddp", 2)
    assert row["trained_parameters"] == row["parameters"] > 1e6
    assert row["tokens_per_s"] > 0 and 0 < row["mfu"] < 1
    assert row["peak_over_forecast"] == pytest.approx(row["peak_memory_bytes"] / row["forecast_bytes"])


def test_a_run_that_fails_is_told_with_its_reason_and_it_ends_with_1(tmp_path: Path) -> None:
    broken = tmp_path / "runs" / "small"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text('{"model_type": "nothing"}')
    done, told = call(str(tmp_path / "out.json"), "--only", "numbers: fp32 lora", "--keep", str(broken.parent))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  numbers: fp32 lora" in done.stdout
    assert told["verdict"] == "failed"
    (check,) = told["checks"]
    assert check["verdict"] == "failed"
    assert "nothing" in check["words"] or "small" in check["words"]


def test_the_object_is_written_after_each_check(
    tmp_path: Path, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_report

    def fail() -> None:
        raise bench.Broken("too far", {"loss": 0.5})

    def skip() -> None:
        raise bench.Skipped("no such thing")

    path = tmp_path / "out.json"
    report = gpu_report.Report({"gpus": []}, rehearsal=True, only=["a: "], path=path)
    assert report.selects("a: one") and not report.selects("b: one")
    report.tell("a: one", lambda: bench.Found("near", {"loss": 0.1}))
    told = json.loads(path.read_text())
    assert (told["verdict"], told["ended"]) == ("unfinished", None)
    report.tell("a: two", skip)
    report.tell("a: three", fail)
    assert report.end() is False
    told = json.loads(path.read_text())
    assert told["verdict"] == "failed" and told["ended"] >= told["begun"]
    assert told["checks"] == [
        {"name": "a: one", "verdict": "ok", "words": "near", "numbers": {"loss": 0.1}},
        {"name": "a: two", "verdict": "skipped", "words": "no such thing", "numbers": {}},
        {"name": "a: three", "verdict": "failed", "words": "too far", "numbers": {"loss": 0.5}},
    ]
    assert capsys.readouterr().out.endswith("1 ok, 1 skipped, 1 failed\n")


def test_where_nothing_was_checked_not_all_is_well(bench: ModuleType) -> None:
    import gpu_report

    assert gpu_report.Report({}, rehearsal=True).end() is False


@pytest.mark.parametrize(
    ("adapter", "param", "code", "skips"),
    [
        ("lora", "parallelism.tensor", "not_offered", True),
        ("qlora", "parallelism.strategy", "invalid_value", True),
        ("lora", "parallelism.strategy", "invalid_value", False),
        ("qlora", "precision", "invalid_value", False),
    ],
)
def test_what_is_not_offered_is_skipped_and_what_is_refused_otherwise_fails(
    adapter: str, param: str, code: str, skips: bool, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(body: object) -> None:
        raise SpecError("it is not", param=param, code=code)

    monkeypatch.setattr(bench, "parse_spec", refuse)
    with pytest.raises(bench.Skipped if skips else bench.Broken, match="it is not"):
        bench.require_offered({"adapter": {"type": adapter}})


def test_layouts_take_the_devices_that_they_say(layouts: ModuleType, tmp_path: Path) -> None:
    """By the engine's own count, for those that it takes."""
    for layout in layouts.LAYOUTS:
        devices = {"resources": {"gpus": layout.ranks}, "parallelism": layout.parallelism}
        try:
            parsed = spec.parse_spec({"model": "m", "training_file": "f", **devices})
        except SpecError as refused:
            assert refused.code == "not_offered", refused
        else:
            assert parsed.layout.ranks == layout.ranks in (2, 4)
    assert len({(layout.name, layout.ranks) for layout in layouts.LAYOUTS}) == len(layouts.LAYOUTS)


def test_results_are_compared_tensor_by_tensor(layouts: ModuleType, bench: ModuleType, tmp_path: Path) -> None:
    def save(name: str, **tensors: torch.Tensor) -> Path:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    one = save("one", a=torch.tensor([1.0, -4.0]), b=torch.tensor([2.0]))
    assert layouts.find_difference(one, one) == 0
    other = save("other", a=torch.tensor([1.0, -4.0]), b=torch.tensor([2.5]))
    assert layouts.find_difference(other, one) == 0.125
    for number, tensors in enumerate([{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}]):
        with pytest.raises(bench.Broken, match="other tensors"):
            layouts.find_difference(save(f"wrong {number}", **tensors), one)


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
    found: dict[int, tuple[float, float]], fails: bool, numbers: ModuleType, bench: ModuleType
) -> None:
    if fails:
        with pytest.raises(bench.Broken):
            numbers.compare(found, {1: (2.0, 1.0)}, (0.01, 0.05))
    else:
        assert "loss within" in numbers.compare(found, {1: (2.0, 1.0)}, (0.01, 0.05)).words


def test_a_saver_that_saves_nothing_is_broken(bench: ModuleType) -> None:
    import gpu_memory

    peaks = {"plain": 100, "offloading": 50, "checkpointing": 60, "both savers": 40}
    assert "offloading" in gpu_memory.check_saving(peaks).words
    for name, peak in {"offloading": 100, "checkpointing": 101, "both savers": 70}.items():
        with pytest.raises(bench.Broken, match="saves nothing"):
            gpu_memory.check_saving({**peaks, name: peak})
    with pytest.raises(bench.Broken, match="missing"):
        gpu_memory.check_saving({"plain": 1})
