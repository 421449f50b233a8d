"""Whether this host's GPU trains as the CPU does: `python scripts/check_gpu.py`, some ten minutes on one GPU.

Trains small models through the engine's own command, a process a run, and prints a line for each check:

- numbers: the loss and the gradient norm of each step, against the CPU in fp32, for all formats, adapters, optimizers
  and memory savers, and for flash-attn where it is installed;
- memory: the peak of a larger model against the plan's forecast, and that the savers save;
- resume: a run that was stopped and goes on comes to the same bits as one that was not;
- release: after all that no memory of the GPU is taken.

Ends with 0 where all is well, 1 where a check failed, 77 where this host has no GPU. `--rehearse` tries the script
itself on a host without one.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_bench import RUN_LIMIT_S, Bench, Broken, curve_of, events_of, make_rows, result_of, save_base, why_ended

from training.hardware import find_hardware
from training.rundir import EXIT_STOPPED, file_sha256

Curve = dict[int, tuple[float, float]]

EXIT_WELL, EXIT_BROKEN, EXIT_NO_GPU = 0, 1, 77
TOLERANCES = {"fp32": (1e-4, 1e-3), "fp16": (2e-3, 2e-2), "bf16": (1e-2, 1e-1)}
"""Of the loss and the gradient norm, relative to the CPU in fp32. In 16 bits the CPU is off by up to 7e-5 and 3e-4
in fp16, 5e-3 and 3e-2 in bf16."""
QUANTISED_TOLERANCES = (3e-2, 2e-1)
"""The blocks of 4 bits are rounded by other code on the CPU."""
FORECAST_RANGE = (0.5, 1.25)
"""Measured over forecast, less what any process on a GPU takes."""
WORKSPACE_BYTES = 256 * 2**20
RELEASE_BYTES = 64 * 2**20
MEMORY_TOKENS = 1500


@dataclass(frozen=True)
class Case:
    """A run of the small model on the GPU, compared with the CPU's in fp32 without savers."""

    name: str
    body: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)
    method: str = "supervised"
    gpu_only: dict[str, Any] = field(default_factory=dict)
    "What the CPU's run is not asked for."
    gpu_only_hyper: dict[str, Any] = field(default_factory=dict)


def list_cases(flash: bool) -> list[Case]:
    lora, qlora, full = {"type": "lora", "r": 8}, {"type": "qlora", "r": 8}, {"type": "full"}
    adapters = {"lora": lora, "qlora": qlora, "full": full}
    cases = [
        Case(f"{precision} {name}", {"adapter": adapter}, gpu_only={"precision": precision})
        for precision in TOLERANCES
        for name, adapter in adapters.items()
    ]
    savers = {"gradient_checkpointing": {"gradient_checkpointing": True}, "offloading": {"activation_offloading": True}}
    savers["both savers"] = {**savers["gradient_checkpointing"], **savers["offloading"]}
    for name, saver in savers.items():
        cases += [
            Case(f"bf16 {kind} {name}", {"adapter": adapters[kind]}, gpu_only={"precision": "bf16", **saver})
            for kind in adapters
        ]
    cases += [
        Case("bf16 a row a pass", {"adapter": lora}, {"micro_batch_size": 1}, gpu_only={"precision": "bf16"}),
        Case("bf16 packed", {"adapter": lora}, {"packing": True, "batch_size": 2}, gpu_only={"precision": "bf16"}),
        Case("bf16 eager", {"adapter": lora}, gpu_only={"precision": "bf16", "attention": "eager"}),
        Case("bf16 dpo", {"adapter": lora}, method="dpo", gpu_only={"precision": "bf16"}),
        Case("bf16 kto", {"adapter": lora}, method="kto", gpu_only={"precision": "bf16"}),
        Case("bf16 8-bit adamw", {"adapter": full}, {"optimizer": "adamw_8bit"}, gpu_only={"precision": "bf16"}),
        Case("bf16 adafactor", {"adapter": full}, {"optimizer": "adafactor"}, gpu_only={"precision": "bf16"}),
        Case(
            "bf16 paged 8-bit adamw",
            {"adapter": full},
            {"optimizer": "adamw_8bit"},
            gpu_only={"precision": "bf16"},
            gpu_only_hyper={"optimizer": "paged_adamw_8bit"},
        ),
    ]
    if flash:
        flashes = {"lora": lora, "full": full, "qlora": qlora}
        cases += [
            Case(
                f"{precision} {name} flash",
                {"adapter": adapter},
                gpu_only={"precision": precision, "attention": "flash"},
            )
            for precision in ("bf16", "fp16")
            for name, adapter in flashes.items()
        ]
        packed = {"packing": True, "batch_size": 2}
        cases.append(
            Case("bf16 flash packed", {"adapter": lora}, packed, gpu_only={"precision": "bf16", "attention": "flash"})
        )
    return cases


# Checks


def check_numbers(bench: Bench, case: Case, reference: Future[Curve]) -> str:
    gpu_only = {
        name: asked for name, asked in case.gpu_only.items() if name != "activation_offloading" or not bench.rehearse
    }
    hyper = {**case.hyper, **({} if bench.rehearse else case.gpu_only_hyper)}
    body = bench.make_body("small", case.method, hyper, **case.body, **gpu_only)
    found = curve_of(bench.run(case.name, body))
    quantised = case.body["adapter"]["type"] == "qlora"
    limits = QUANTISED_TOLERANCES if quantised else TOLERANCES[gpu_only.get("precision", "fp32")]
    return compare(found, reference.result(), limits)


def compare(found: Curve, reference: Curve, limits: tuple[float, float]) -> str:
    """Raises Broken where the loss or gradient norm of a step is further from the reference than its share of it."""
    if found.keys() != reference.keys() or not found:
        raise Broken(f"made steps {sorted(found)}, the CPU {sorted(reference)}")
    worst = [max(abs(found[step][n] / reference[step][n] - 1) for step in found) for n in (0, 1)]
    words = f"loss within {worst[0]:.1e}, gradient norm within {worst[1]:.1e}"
    if not all(one <= limit for one, limit in zip(worst, limits, strict=True)):
        raise Broken(f"{words} of the CPU's; {limits[0]:g} and {limits[1]:g} are allowed")
    return words


def check_memory(bench: Bench, name: str, measured: dict[str, int], **asked: Any) -> str:
    hyper = {"batch_size": 2, "micro_batch_size": asked.pop("micro", 1)}
    run_dir = bench.run(f"memory {name}", bench.make_body("large", "supervised", hyper, precision="bf16", **asked))
    forecast = json.loads(run_dir.plan.read_text())["memory_total_bytes"]
    peak = measured[name] = max(event.data["peak_memory_bytes"] for event in events_of(run_dir, "metrics"))
    share = max(0, peak - WORKSPACE_BYTES) / forecast, peak / forecast
    words = f"peak {peak / 2**30:.2f} GiB, forecast {forecast / 2**30:.2f} GiB"
    if share[1] < FORECAST_RANGE[0] or share[0] > FORECAST_RANGE[1]:
        raise Broken(f"{words}: {FORECAST_RANGE[0]:g} to {FORECAST_RANGE[1]:g} times the forecast is allowed")
    return words


def check_saving(measured: dict[str, int]) -> str:
    order = ["plain", "offloading", "checkpointing", "both savers"]
    peaks = [measured[name] for name in order if name in measured]
    words = ", ".join(f"{name} {peak / 2**30:.2f} GiB" for name, peak in zip(order, peaks, strict=False))
    if len(peaks) < len(order):
        raise Broken("a run is missing")
    if not (peaks[1] < peaks[0] and peaks[2] < peaks[0] and peaks[3] <= peaks[2]):
        raise Broken(f"a saver saves nothing: {words}")
    return words


def check_resume(bench: Bench, name: str, hyper: dict[str, Any], **asked: Any) -> str:
    """Stop a run in its midst and go on."""
    hyper = {"max_steps": 100, "save_steps": 7, **hyper}
    adapter = asked.pop("adapter", {"r": 8, "dropout": 0.1})
    body = bench.make_body("small", "supervised", hyper, adapter=adapter, **({} if bench.rehearse else asked))
    whole = bench.run(f"whole {name}", body)
    run_dir, process = bench.start(f"stopped {name}", body)
    deadline = time.monotonic() + RUN_LIMIT_S
    while process.poll() is None and len(events_of(run_dir, "metrics")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if process.wait(RUN_LIMIT_S) != EXIT_STOPPED:
        raise Broken(f"it was to stop, and did not: {why_ended(run_dir)}")
    stopped_at = events_of(run_dir, "stopped")[-1].step
    bench.run(f"stopped {name}", body, attempt=2)
    differing = [step for step, numbers in curve_of(whole).items() if curve_of(run_dir).get(step) != numbers]
    if differing:
        raise Broken(f"stopped at step {stopped_at}, it differs from step {differing[0]} on")
    results = [next(folder.rglob("*.safetensors")) for folder in (result_of(whole), result_of(run_dir))]
    if file_sha256(results[0]) != file_sha256(results[1]):
        raise Broken(f"stopped at step {stopped_at}, the curve is the same and the weights are not")
    warned = [
        event.data["message"] for event in events_of(whole, "warning") if event.data.get("code") == "not_deterministic"
    ]
    return f"stopped at step {stopped_at}, the same bits" + (f" (though: {warned[0]})" if warned else "")


def used_bytes() -> int:
    """Of the first GPU, by all processes, as its driver tells."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(find_hardware().gpus[0].index)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()


def check_release(before: int) -> str:
    for _ in range(20):
        left = used_bytes() - before
        if left <= RELEASE_BYTES:
            return f"{max(0, left) / 2**20:.0f} MiB more than before"
        time.sleep(0.5)
    raise Broken(f"{left / 2**20:.0f} MiB more are taken than before the first run (or another process came)")


# All of it


class Table:
    def __init__(self) -> None:
        self.failed = 0

    def tell(self, name: str, check: Callable[[], str]) -> None:
        try:
            verdict, words = "ok", check()
        except (Broken, subprocess.TimeoutExpired) as bad:
            verdict, words = "FAILED", str(bad)
            self.failed += 1
        print(f"{verdict:<7} {name:<42} {words}", flush=True)


def check_all(bench: Bench, flash: bool, only: str, at_a_time: int) -> int:
    table, before = Table(), 0 if bench.rehearse else used_bytes()
    save_base(
        bench.folder / "small",
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    for method in ("supervised", "dpo", "kto"):
        lines = [json.dumps(row) for row in make_rows(method, 24, 120)]
        (bench.folder / f"small-{method}.jsonl").write_text("\n".join(lines) + "\n")
    cases = [case for case in list_cases(flash) if only in case.name]
    with ThreadPoolExecutor(at_a_time) as pool:
        # In the order of submission: whatever a check waits for has been started before it.
        references = {reference_key(case): case for case in cases}
        curves = {key: pool.submit(make_reference, bench, case) for key, case in references.items()}
        checks = {case.name: pool.submit(check_numbers, bench, case, curves[reference_key(case)]) for case in cases}
        for name, check in checks.items():
            table.tell(f"numbers: {name}", check.result)
    if not bench.rehearse:
        check_all_memory(bench, table, flash, only)
    resumes = list_resumes(flash, bench.rehearse)
    for name, (hyper, asked) in resumes.items():
        if only in name:
            table.tell(f"resume: {name}", lambda n=name, h=hyper, a=asked: check_resume(bench, n, h, **a))  # type: ignore[misc]
    if not bench.rehearse:
        table.tell("release", lambda: check_release(before))
    print(f"{table.failed} failed" if table.failed else "all well")
    return EXIT_BROKEN if table.failed else EXIT_WELL


def reference_key(case: Case) -> str:
    return json.dumps([case.body, case.hyper, case.method], sort_keys=True)


def make_reference(bench: Bench, case: Case) -> Curve:
    on_cpu = {"resources": {"gpus": 0}, "precision": "fp32"}
    body = bench.make_body("small", case.method, case.hyper, **case.body, **on_cpu)
    return curve_of(bench.run(f"cpu {case.name}", body))


def list_resumes(flash: bool, rehearse: bool) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name, the hyperparameters and the rest of a body."""
    bf16 = {"precision": "bf16"}
    resumes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"lora bf16": ({}, bf16)}
    if rehearse:
        return resumes
    resumes |= {
        "lora bf16 a row a pass": ({"micro_batch_size": 1}, bf16),
        "lora fp16": ({}, {"precision": "fp16"}),
        "lora fp32": ({}, {"precision": "fp32"}),
        "qlora bf16": ({}, {"adapter": {"type": "qlora"}, **bf16}),
        "full bf16 8-bit adamw": ({"optimizer": "adamw_8bit"}, {"adapter": {"type": "full"}, **bf16}),
        "full bf16 paged": ({"optimizer": "paged_adamw_8bit"}, {"adapter": {"type": "full"}, **bf16}),
        "lora bf16 both savers": ({}, {**bf16, "gradient_checkpointing": True, "activation_offloading": True}),
    }
    if flash:
        resumes["lora bf16 flash"] = ({}, {**bf16, "attention": "flash"})
    return resumes


def check_all_memory(bench: Bench, table: Table, flash: bool, only: str) -> None:
    if only:
        return
    save_base(
        bench.folder / "large",
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    lines = [json.dumps(row) for row in make_rows("supervised", 10, MEMORY_TOKENS)]
    (bench.folder / "large-supervised.jsonl").write_text("\n".join(lines) + "\n")
    measured: dict[str, int] = {}
    off: dict[str, Any] = {"gradient_checkpointing": False, "activation_offloading": False}
    runs: dict[str, dict[str, Any]] = {
        "plain": off,
        "two rows a pass": {**off, "micro": 2},
        "checkpointing": {**off, "gradient_checkpointing": True},
        "offloading": {**off, "activation_offloading": True},
        "both savers": {"gradient_checkpointing": True, "activation_offloading": True},
        "qlora": {**off, "adapter": {"type": "qlora"}},
        "full": {**off, "adapter": {"type": "full"}},
    }
    if flash:
        runs["two rows a pass, flash"] = {**off, "micro": 2, "attention": "flash"}
    for name, asked in runs.items():
        table.tell(f"memory: {name}", lambda n=name, a=asked: check_memory(bench, n, measured, **a))  # type: ignore[misc]
    table.tell("memory: what is saved", lambda: check_saving(measured))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of the checks to make")
    parser.add_argument("--at-a-time", type=int, default=3, help="runs beside each other where only numbers count")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which is kept")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, and only what needs no GPU")
    asked = parser.parse_args()
    hardware = find_hardware()
    if not hardware.gpus and not asked.rehearse:
        print("this host has no GPU that this process may use (CUDA_VISIBLE_DEVICES); nothing was checked")
        return EXIT_NO_GPU
    device = "the CPU, as a rehearsal" if asked.rehearse else hardware.gpus[0].name
    flash = hardware.has_flash_attention and not asked.rehearse
    print(f"on {device}; flash-attn {'is' if hardware.has_flash_attention else 'is not'} installed", flush=True)
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
        return check_all(Bench(asked.keep.resolve(), asked.rehearse), flash, asked.only, asked.at_a_time)
    with tempfile.TemporaryDirectory() as folder:
        return check_all(Bench(Path(folder), asked.rehearse), flash, asked.only, asked.at_a_time)


if __name__ == "__main__":
    sys.exit(main())
