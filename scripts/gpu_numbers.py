"""Whether a GPU computes the numbers of the CPU: the loss and the gradient norm of each step of a small model."""

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gpu_bench import SMALL, Bench, Broken, Curve, Found, curve_of, make_rows, save_base, write_rows
from gpu_report import Report

TOLERANCES = {"fp32": (1e-4, 1e-3), "fp16": (2e-3, 2e-2), "bf16": (1e-2, 1e-1)}
"""Of the loss and the gradient norm, relative to the CPU in fp32. In 16 bits the CPU is off by up to 7e-5 and 3e-4
in fp16, 5e-3 and 3e-2 in bf16."""
QUANTISED_TOLERANCES = (3e-2, 2e-1)
"""The blocks of 4 bits are rounded by other code on the CPU."""


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


def check_numbers(bench: Bench, case: Case, reference: Future[Curve]) -> Found:
    gpu_only = {
        name: asked for name, asked in case.gpu_only.items() if name != "activation_offloading" or not bench.rehearse
    }
    hyper = {**case.hyper, **({} if bench.rehearse else case.gpu_only_hyper)}
    body = bench.make_body("small", case.method, hyper, **case.body, **gpu_only)
    found = curve_of(bench.run(case.name, body))
    quantised = case.body["adapter"]["type"] == "qlora"
    limits = QUANTISED_TOLERANCES if quantised else TOLERANCES[gpu_only.get("precision", "fp32")]
    return compare(found, reference.result(), limits)


def compare(found: Curve, reference: Curve, limits: tuple[float, float], other: str = "the CPU") -> Found:
    """Raises Broken where the loss or gradient norm of a step is further from the reference than its share of it."""
    if found.keys() != reference.keys() or not found:
        raise Broken(f"made steps {sorted(found)}, {other} {sorted(reference)}")
    worst = [max(abs(found[step][n] / reference[step][n] - 1) for step in found) for n in (0, 1)]
    words = f"loss within {worst[0]:.1e}, gradient norm within {worst[1]:.1e}"
    well = all(one <= limit for one, limit in zip(worst, limits, strict=True))
    numbers = {"loss": worst[0], "grad_norm": worst[1], "loss_limit": limits[0], "grad_norm_limit": limits[1]}
    numbers = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    if not well:
        raise Broken(f"{words} of {other}'s; {limits[0]:g} and {limits[1]:g} are allowed", numbers)
    return Found(words, numbers)


def reference_key(case: Case) -> str:
    return json.dumps([case.body, case.hyper, case.method], sort_keys=True)


def make_reference(bench: Bench, case: Case) -> Curve:
    on_cpu = {"resources": {"gpus": 0}, "precision": "fp32"}
    body = bench.make_body("small", case.method, case.hyper, **case.body, **on_cpu)
    return curve_of(bench.run(f"cpu {case.name}", body))


def check_all_numbers(bench: Bench, report: Report) -> None:
    cases = [case for case in list_cases(bench.flash) if report.selects(f"numbers: {case.name}")]
    if not cases:
        return
    save_base(bench.folder / "small", **SMALL)
    for method in {case.method for case in cases}:
        write_rows(bench.folder / f"small-{method}.jsonl", make_rows(method, 24, 120))
    with ThreadPoolExecutor(bench.at_a_time) as pool:
        curves: dict[str, Future[Curve]] = {}
        checks: dict[str, Future[Found]] = {}
        for case in cases:
            # In the order of submission: whatever a check waits for has been started before it.
            key = reference_key(case)
            if key not in curves:
                curves[key] = pool.submit(make_reference, bench, case)
            checks[case.name] = pool.submit(check_numbers, bench, case, curves[key])
        for name, check in checks.items():
            report.tell(f"numbers: {name}", check.result)
