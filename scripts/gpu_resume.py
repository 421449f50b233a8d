"""Whether a run that was stopped and goes on comes to the same bits as one that was not."""

import signal
import subprocess
from typing import Any

from gpu_bench import (
    RUN_LIMIT_S,
    SMALL,
    Bench,
    Broken,
    Found,
    curve_of,
    end,
    events_of,
    make_broken,
    make_rows,
    result_of,
    save_base,
    wait_for_steps,
    write_rows,
)
from gpu_report import Report

from training.rundir import EXIT_STOPPED, file_sha256


def check_resume(bench: Bench, name: str, hyper: dict[str, Any], **asked: Any) -> Found:
    """Stop a run in its midst and go on."""
    hyper = {"max_steps": 100, "save_steps": 7, **hyper}
    adapter = asked.pop("adapter", {"r": 8, "dropout": 0.1})
    body = bench.make_body("small", "supervised", hyper, adapter=adapter, **({} if bench.rehearse else asked))
    whole = bench.run(f"whole {name}", body)
    run_dir, process = bench.start(f"stopped {name}", body)
    try:
        wait_for_steps(run_dir, process, 3, RUN_LIMIT_S)
        process.send_signal(signal.SIGTERM)
        if process.wait(RUN_LIMIT_S) != EXIT_STOPPED:
            raise Broken(f"it was to stop, and did not: {make_broken(run_dir)}")
    except subprocess.TimeoutExpired:
        raise Broken(f"it was to stop, and did not in {RUN_LIMIT_S} s; see {run_dir.log}") from None
    finally:
        end(process)
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
    words = f"stopped at step {stopped_at}, the same bits" + (f" (though: {warned[0]})" if warned else "")
    return Found(words, {"stopped_at": stopped_at})


def list_resumes(bench: Bench) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name, the hyperparameters and the rest of a body."""
    bf16 = {"precision": "bf16"}
    resumes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"lora bf16": ({}, bf16)}
    if bench.rehearse:
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
    if bench.gpus > 1:
        full, two = {"adapter": {"type": "full"}}, {"resources": {"gpus": 2}}
        resumes["lora bf16 ddp"] = ({}, {**bf16, **two, "parallelism": {"strategy": "ddp"}})
        resumes["full bf16 fsdp"] = ({}, {**bf16, **two, **full, "parallelism": {"strategy": "fsdp"}})
    if bench.flash:
        resumes["lora bf16 flash"] = ({}, {**bf16, "attention": "flash"})
    return resumes


def check_all_resumes(bench: Bench, report: Report) -> None:
    resumes = {name: asked for name, asked in list_resumes(bench).items() if report.selects(f"resume: {name}")}
    if not resumes:
        return
    save_base(bench.folder / "small", **SMALL)
    write_rows(bench.folder / "small-supervised.jsonl", make_rows("supervised", 24, 120))
    for name, (hyper, asked) in resumes.items():
        report.tell(f"resume: {name}", lambda n=name, h=hyper, a=asked: check_resume(bench, n, h, **a))  # type: ignore[misc]
