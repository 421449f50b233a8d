"""The memory of a larger model on a GPU: its peak against the plan's forecast, what savers save, what is left taken."""

import time
from typing import Any

import pynvml
from gpu_bench import OFF, Bench, Broken, Found, make_rows, peak_of, save_base, write_rows
from gpu_report import GIB, Report

from training.hardware import find_hardware
from training.rundir import read_json

FORECAST_RANGE = (0.5, 1.25)
"""Measured over forecast, less what any process on a GPU takes."""
WORKSPACE_BYTES = 256 * 2**20
RELEASE_BYTES = 64 * 2**20
MEMORY_TOKENS = 1500
SAVERS = ("plain", "offloading", "checkpointing", "both savers")


def check_memory(bench: Bench, name: str, measured: dict[str, int], **asked: Any) -> Found:
    hyper = {"batch_size": 2, "micro_batch_size": asked.pop("micro", 1)}
    run_dir = bench.run(f"memory {name}", bench.make_body("large", "supervised", hyper, precision="bf16", **asked))
    forecast = read_json(run_dir.plan)["memory_total_bytes"]
    peak = measured[name] = peak_of(run_dir)
    share = max(0, peak - WORKSPACE_BYTES) / forecast, peak / forecast
    words = f"peak {peak / GIB:.2f} GiB, forecast {forecast / GIB:.2f} GiB"
    numbers = {"peak_memory_bytes": peak, "forecast_bytes": forecast, "peak_over_forecast": share[1]}
    if share[1] < FORECAST_RANGE[0] or share[0] > FORECAST_RANGE[1]:
        raise Broken(f"{words}: {FORECAST_RANGE[0]:g} to {FORECAST_RANGE[1]:g} times the forecast is allowed", numbers)
    return Found(words, numbers)


def check_saving(measured: dict[str, int]) -> Found:
    peaks = [measured[name] for name in SAVERS if name in measured]
    words = ", ".join(f"{name} {peak / GIB:.2f} GiB" for name, peak in zip(SAVERS, peaks, strict=False))
    if len(peaks) < len(SAVERS):
        raise Broken("a run is missing")
    if not (peaks[1] < peaks[0] and peaks[2] < peaks[0] and peaks[3] <= peaks[2]):
        raise Broken(f"a saver saves nothing: {words}", dict(measured))
    return Found(words)


def used_bytes() -> int:
    """Of all GPUs, by all processes, as their driver tells."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in find_hardware().gpus]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def check_release(before: int) -> Found:
    for _ in range(20):
        left = used_bytes() - before
        if left <= RELEASE_BYTES:
            return Found(f"{max(0, left) / 2**20:.0f} MiB more than before", {"left_bytes": max(0, left)})
        time.sleep(0.5)
    words = f"{left / 2**20:.0f} MiB more are taken than before the first run (or another process came)"
    raise Broken(words, {"left_bytes": left})


def check_all_memory(bench: Bench, report: Report) -> None:
    runs: dict[str, dict[str, Any]] = {
        "plain": OFF,
        "two rows a pass": {**OFF, "micro": 2},
        "checkpointing": {**OFF, "gradient_checkpointing": True},
        "offloading": {**OFF, "activation_offloading": True},
        "both savers": {"gradient_checkpointing": True, "activation_offloading": True},
        "qlora": {**OFF, "adapter": {"type": "qlora"}},
        "full": {**OFF, "adapter": {"type": "full"}},
    }
    if bench.flash:
        runs["two rows a pass, flash"] = {**OFF, "micro": 2, "attention": "flash"}
    runs = {name: asked for name, asked in runs.items() if report.selects(f"memory: {name}")}
    if not runs:
        return
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12}
    save_base(bench.folder / "large", **shape, num_attention_heads=32, num_key_value_heads=8)
    write_rows(bench.folder / "large-supervised.jsonl", make_rows("supervised", 10, MEMORY_TOKENS))
    measured: dict[str, int] = {}
    for name, asked in runs.items():
        report.tell(f"memory: {name}", lambda n=name, a=asked: check_memory(bench, n, measured, **a))  # type: ignore[misc]
    if set(SAVERS) <= set(runs):
        report.tell("memory: what is saved", lambda: check_saving(measured))
