"""How fast a model of a billion parameters is trained here, and in how much memory, against the plan's forecast."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from gpu_bench import (
    SMALL,
    Bench,
    Broken,
    Found,
    Skipped,
    end,
    events_of,
    make_broken,
    make_rows,
    peak_of,
    save_base,
    wait_for_steps,
    write_rows,
)
from gpu_report import GIB, Report

from training.hardware import find_hardware
from training.rundir import read_json

LIMIT_S = 900
STEPS, WARM_STEPS = 10, 3
"""The first are left out: kernels are chosen and memory is taken in them."""
ROWS_A_RANK = 8
BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
"""The shape of Llama 3.2 1B."""
LETTERS = {False: (512, 2048), True: (64, 160)}
"""A letter is a token. Rehearsed, the rows are as small as the model."""


@dataclass(frozen=True)
class Training:
    adapter: str
    attention: str = "sdpa"
    strategy: str = "none"
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"{self.adapter} {self.attention}" + (f" {self.strategy} on {self.ranks}" if self.ranks > 1 else "")


def list_trainings(bench: Bench) -> list[Training]:
    """On one device each kind of training; on as many as there are, up to 4, each with the strategies made for it."""
    attentions = ("sdpa", "flash") if bench.flash else ("sdpa",)
    trainings = [Training(adapter, attention) for adapter in ("lora", "qlora", "full") for attention in attentions]
    ranks = 2 if bench.rehearse else max(n for n in (1, 2, 4) if n <= bench.gpus)
    if ranks == 1:
        return trainings
    pairs = [("lora", "ddp"), ("qlora", "ddp"), ("full", "ddp"), ("full", "fsdp"), ("full", "zero2"), ("full", "zero3")]
    return trainings + [Training(adapter, "sdpa", strategy, ranks) for adapter, strategy in pairs]


def measure(bench: Bench, training: Training) -> dict[str, Any]:
    """A row of the table. The run is ended once it has been measured: its checkpoint would be of many GB.

    Raises:
        Skipped: the plan says that it does not fit these GPUs, and it did not.
        Broken: it failed otherwise.
    """
    # The micro-batch and whether layers are checkpointed are left to the plan, as in a job that asks for neither.
    hyper = {"batch_size": ROWS_A_RANK * training.ranks, "micro_batch_size": "auto", "max_steps": 1000}
    body = bench.make_body(
        "speed",
        "supervised",
        {**hyper, "save_steps": 1000},
        adapter={"type": training.adapter},
        precision="fp32" if bench.rehearse else "bf16",
        attention=training.attention,
        resources={"gpus": 0 if bench.rehearse else training.ranks},
        parallelism={"strategy": training.strategy, "data": training.ranks},
    )
    run_dir, process = bench.start(f"speed {training.name}", body)
    try:
        made = wait_for_steps(run_dir, process, STEPS, LIMIT_S)
        failed = process.poll() is not None
    finally:
        end(process)
    if not made and not failed:
        raise Broken(f"it made no {STEPS} steps in {LIMIT_S} s; see {run_dir.log}")
    if not made:
        broken = make_broken(run_dir)
        if broken.code == "out_of_memory" and not bench.rehearse and not fits(read_json(run_dir.plan)):
            raise Skipped(f"these GPUs are too small for it, as the plan says: {broken}")
        raise broken
    plan = read_json(run_dir.plan)
    steps = [event.data for event in events_of(run_dir, "metrics")][WARM_STEPS:STEPS]
    shares = [data["mfu"] for data in steps if data.get("mfu") is not None]
    peak, forecast = peak_of(run_dir), plan["memory_total_bytes"]
    return {
        "name": training.name,
        "adapter": training.adapter,
        "attention": training.attention,
        "precision": plan["precision"],
        "strategy": plan["strategy"],
        "ranks": plan["ranks"],
        "parameters": plan["parameters"],
        "trained_parameters": plan["trained_parameters"],
        "batch_size": plan["batch_size"],
        "micro_batch_size": plan["micro_batch_size"],
        "tokens_per_pass": plan["tokens_per_pass"],
        "gradient_checkpointing": plan["gradient_checkpointing"],
        "activation_offloading": plan["activation_offloading"],
        "tokens_per_s": median(data["tokens_per_s"] for data in steps),
        "step_s": median(data["step_s"] for data in steps),
        "mfu": median(shares) if shares else None,
        "peak_memory_bytes": peak,
        "forecast_bytes": forecast,
        "peak_over_forecast": peak / forecast,
    }


def fits(plan: dict[str, Any]) -> bool:
    return bool(plan["memory_total_bytes"] < find_hardware().gpus[0].memory_bytes)


def check_speed(bench: Bench, report: Report, training: Training) -> Found:
    row = measure(bench, training)
    report.add_row(row)
    words = f"{row['tokens_per_s']:.0f} tokens/s, " + (f"MFU {row['mfu']:.1%}, " if row["mfu"] is not None else "")
    words += f"peak {row['peak_memory_bytes'] / GIB:.2f} GiB, {row['peak_over_forecast']:.2f} x the forecast"
    return Found(words, {name: row[name] for name in ("tokens_per_s", "mfu", "peak_memory_bytes", "forecast_bytes")})


def check_all_speeds(bench: Bench, report: Report) -> None:
    """One run at a time. What comes out is told and not judged: it is what the host does."""
    trainings = [training for training in list_trainings(bench) if report.selects(f"speed: {training.name}")]
    if not trainings:
        return
    shape, dtype = (SMALL, "float32") if bench.rehearse else (BILLION, "bfloat16")
    save_base(bench.folder / "speed", dtype=dtype, **shape)
    shortest, longest = LETTERS[bench.rehearse]
    count = 64
    lengths = [shortest + (longest - shortest) * place // (count - 1) for place in range(count)]
    rows = [make_rows("supervised", 1, letters)[0] for letters in lengths]
    write_rows(bench.folder / "speed-supervised.jsonl", rows)
    for training in trainings:
        report.tell(f"speed: {training.name}", lambda one=training: check_speed(bench, report, one))  # type: ignore[misc]
