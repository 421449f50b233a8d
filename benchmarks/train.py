"""`make bench-train`: our engine, TRL's SFTTrainer and a plain padded PyTorch loop on the same rows, in turn.

Each contestant runs in a process of its own, one after another, three turns in all, each turn in another order; what
is printed are medians over the turns, and ratios of ours to theirs in one turn, since machines are shared and noisy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.demo_model import find_demo_model
from store.settings import Settings
from training.events import read_events
from training.rundir import RunDir, write_json

HERE = Path(__file__).resolve().parent
INSTRUCTIONS = HERE.parent.parent / "shared" / "data" / "self_instruct_seed" / "seed_tasks.jsonl"
DEMO_ROWS = HERE.parent / "cli" / "demo_rows.jsonl"
TURNS, STEPS, BATCH, RATE, SEED = 3, 10, 4, 2e-4, 7
CONTESTANTS = ("burnish", "trl", "plain", "burnish all-linear")
TARGETS = {"q_proj and v_proj": ["q_proj", "v_proj"], "all-linear": "all-linear"}


@dataclass(frozen=True)
class Result:
    """What one contestant did in one turn. `tokens` are those of the rows, padding not counted; rates are per second,
    over all steps but the first, which warms up."""

    name: str
    losses: list[float]
    tokens_per_s: float
    peak_bytes: int
    first_step_s: float
    "From the start of the process to the start of the first step."
    flops_per_s: float | None = None
    matmul_flops_per_s: float | None = None
    "What plain matrix products reached right before and after."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--model", help="a folder; SmolLM2-135M-Instruct where none is named")
    parser.add_argument("--json", type=Path, help="where to write all that was measured")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as folder:
        work = Path(folder)
        model = asked.model or _model_folder()
        rows = _write_rows(work / "rows.jsonl")
        for name, targets in TARGETS.items():
            write_json(work / f"{name}.json", _make_spec(model, rows, targets, asked.steps))
        # Once, not counted: reads the model into the page cache and writes the token ids that the others train on.
        _call("encode", work, work / "q_proj and v_proj.json")
        turns = [_run_turn(work, turn) for turn in range(asked.turns)]
    if asked.json:
        asked.json.write_text(json.dumps([[asdict(result) for result in turn.values()] for turn in turns], indent=1))
    return _report(turns)


def _model_folder() -> str:
    from training.rank.gguf import file_digest, get_converted

    named = find_demo_model(Settings(), print)
    path = Path(named)
    return str(get_converted(path, file_digest(path))) if path.suffix == ".gguf" else named


def _write_rows(target: Path) -> Path:
    """Chat rows of very different lengths: the seed tasks of Self-Instruct where they are at hand, else the demo's."""
    if not INSTRUCTIONS.exists():
        target.write_bytes(DEMO_ROWS.read_bytes())
        return target
    with target.open("w") as file:
        for line in INSTRUCTIONS.read_text("utf-8").splitlines():
            task = json.loads(line)
            instance = task["instances"][0]
            asked = "\n\n".join(part for part in (task["instruction"], instance["input"]) if part)
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": instance["output"]}]
            print(json.dumps({"messages": messages}), file=file)
    return target


def _make_spec(model: str, rows: Path, targets: Any, steps: int) -> dict[str, Any]:
    hyper = {
        "batch_size": BATCH, "max_steps": steps, "learning_rate": RATE, "lr_scheduler": "constant", "warmup_steps": 0,
        "save_steps": steps,
    }  # fmt: skip
    return {
        "model": model,
        "training_file": str(rows),
        "seed": SEED,
        "precision": "fp32",
        "gradient_checkpointing": False,
        "adapter": {"r": 8, "alpha": 16, "target_modules": targets},
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyper}},
        "resources": {"gpus": 0},
    }


def _run_turn(work: Path, turn: int) -> dict[str, Result]:
    order = [*CONTESTANTS[turn % len(CONTESTANTS) :], *CONTESTANTS[: turn % len(CONTESTANTS)]]
    results = {}
    for name in order:
        run = _run_ours if name.startswith("burnish") else _run_theirs
        results[name] = run(name, work, turn)
        result = results[name]
        print(
            f"turn {turn + 1}  {name:20} {result.tokens_per_s:7.1f} tokens/s  {result.peak_bytes / 1e9:5.2f} GB  "
            f"first step after {result.first_step_s:5.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return {name: results[name] for name in CONTESTANTS}


def _run_ours(name: str, work: Path, turn: int) -> Result:
    """The whole engine, as a service starts it."""
    targets = "all-linear" if name.endswith("all-linear") else "q_proj and v_proj"
    run_dir = RunDir(work / f"{name} {turn}")
    before = _measure_matmul(work)
    begun = time.time()
    command = [sys.executable, "-m", "training", "run", str(work / f"{targets}.json"), "--run-dir", str(run_dir.path)]
    peak = _wait([*command, "--quiet"])
    after = _measure_matmul(work)
    events, _ = read_events(run_dir.events, 0)
    steps = [event for event in events if event.type == "metrics"]
    first, rest = steps[0], steps[1:]
    seconds = sum(step.data["step_s"] for step in rest)
    tokens = rest[-1].data["num_tokens"] - first.data["num_tokens"]
    return Result(
        name,
        [step.data["train_loss"] for step in steps],
        tokens / seconds,
        peak,
        first.at - first.data["step_s"] - begun,
        (rest[-1].data["flops"] - first.data["flops"]) / seconds,
        max(before, after),
    )


def _run_theirs(name: str, work: Path, turn: int) -> Result:
    out = work / f"{name} {turn}.json"
    begun = time.time()
    peak = _call(name, work, out)
    told = json.loads(out.read_text())
    seconds = sum(told["step_s"][1:])
    return Result(name, told["losses"], sum(told["tokens"][1:]) / seconds, peak, told["first_step_at"] - begun)


def _measure_matmul(work: Path) -> float:
    out = work / "matmul.json"
    _call("matmul", work, out)
    return float(json.loads(out.read_text()))


def _call(what: str, work: Path, path: Path) -> int:
    return _wait([sys.executable, "-m", "benchmarks.train_peers", what, str(work), str(path)])


def _wait(command: list[str]) -> int:
    """Run a command to its end; the peak of resident memory, its own or of a process that it started, in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{log.read().decode(errors='replace')[-3000:]}")
    return usage.ru_maxrss * 1024


def _report(turns: list[dict[str, Result]]) -> int:
    def median(name: str, field: str) -> float:
        return statistics.median(getattr(turn[name], field) for turn in turns)

    def ratio(over: str, under: str, field: str) -> float:
        return statistics.median(getattr(turn[over], field) / getattr(turn[under], field) for turn in turns)

    print(f"\n{'':20} tokens/s   peak GB   s to first step")
    for name in CONTESTANTS:
        print(
            f"{name:20} {median(name, 'tokens_per_s'):8.1f} {median(name, 'peak_bytes') / 1e9:9.2f} "
            f"{median(name, 'first_step_s'):10.1f}"
        )
    apart = {
        other: max(
            abs(a - b) for turn in turns for a, b in zip(turn["burnish"].losses, turn[other].losses, strict=True)
        )
        for other in ("plain", "trl")
    }
    share = {
        name: statistics.median(turn[name].flops_per_s / turn[name].matmul_flops_per_s for turn in turns)
        for name in ("burnish", "burnish all-linear")
    }
    checks = [
        ("tokens/s over TRL's", ratio("burnish", "trl", "tokens_per_s"), ">=", 2.2),
        ("tokens/s over the plain loop's", ratio("burnish", "plain", "tokens_per_s"), ">=", 1.0),
        ("peak memory over TRL's", ratio("burnish", "trl", "peak_bytes"), "<=", 0.4),
        ("largest difference of a loss from the plain loop's", apart["plain"], "<=", 1e-4),
        ("largest difference of a loss from TRL's", apart["trl"], "<=", 1e-4),
        ("operations/s over those of plain matrix products", share["burnish"], ">=", 0.85),
        (
            "operations/s of all-linear over those of q and v",
            ratio("burnish all-linear", "burnish", "flops_per_s"),
            ">=",
            0.9,
        ),
        ("seconds to the first step over TRL's", ratio("burnish", "trl", "first_step_s"), "<=", 1.0),
    ]
    print(f"\n{'':52} {'found':>10}     wanted")
    missed = 0
    for what, found, sign, wanted in checks:
        met = found >= wanted if sign == ">=" else found <= wanted
        missed += not met
        print(f"{what:52} {found:10.4g}  {sign} {wanted:<7g} {'' if met else 'missed'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
