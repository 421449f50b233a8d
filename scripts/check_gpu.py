"""Whether this host's GPUs train as the CPU does, several as one does, and how fast: scripts/gpu_check.sh.

Trains small models through the engine's own command, a process a run, and prints a line for each check:

- numbers: the loss and the gradient norm of each step, against the CPU in fp32, for all formats, adapters, optimizers
  and memory savers, and for flash-attn where it is installed;
- memory: the peak of a larger model against the plan's forecast, and that the savers save;
- resume: a run that was stopped and goes on comes to the same bits as one that was not;
- layouts: on 2 and 4 GPUs, where they are there, each strategy and split against one GPU: losses, gradient norms and
  weights, in fp32, bf16 and NF4;
- speed: tokens per second, MFU and peak memory of LoRA, QLoRA and full fine-tuning of a Llama with a billion random
  parameters, with rows of 512 to 2048 tokens;
- release: after all that no memory of the GPUs is taken.

Some ten minutes on one GPU, and half an hour more on several. On a host without a GPU, and with `--rehearse`, what
needs none is tried on the CPU: numbers and resume, layouts by two processes in fp32, speed with a small model.

Ends with 0 where all is well, 1 where a check failed, 77 where all is well and no GPU was checked.

`--json FILE` writes one object, anew after each check:

- verdict: "ok", "failed", or "unfinished" as long as it runs; rehearsal: whether no GPU was checked; only: what
  `--only` said; begun, ended: times in UTC, `ended` null before the end;
- host: gpus (of each index, name, memory_bytes, compute_capability), driver, cuda (that torch was built for),
  cpu_cores, memory_bytes, and the versions python, torch, transformers, peft, deepspeed, bitsandbytes, flash_attn; null
  for what is not there;
- checks: of each name, verdict ("ok", "failed", or "skipped" for what this version does not offer or these GPUs are too
  small for), words, and numbers: of numbers and layouts loss and grad_norm, the largest relative difference of a
  step, with loss_limit and grad_norm_limit, and of layouts weights, relative to the largest, and ranks; of memory and
  speed peak_memory_bytes and forecast_bytes; of resume stopped_at, of release left_bytes;
- table: of each speed name, adapter, attention, precision, strategy, ranks, parameters, trained_parameters, batch_size,
  micro_batch_size, tokens_per_pass, gradient_checkpointing, activation_offloading, tokens_per_s and step_s (of all
  ranks, median of the later steps), mfu (null where the peak of the GPU is not known), peak_memory_bytes (of the
  fullest rank; on the CPU all that its process takes), forecast_bytes (of the plan, for a rank), peak_over_forecast.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import psutil
from gpu_bench import STARTING, Bench, kill_all
from gpu_layouts import check_all_layouts
from gpu_memory import check_all_memory, check_release, used_bytes
from gpu_numbers import check_all_numbers
from gpu_report import Report, describe_host
from gpu_resume import check_all_resumes
from gpu_speed import check_all_speeds

from training.hardware import find_hardware

EXIT_WELL, EXIT_BROKEN, EXIT_NO_GPU = 0, 1, 77


def check_all(bench: Bench, report: Report) -> int:
    before = 0 if bench.rehearse else used_bytes()
    check_all_numbers(bench, report)
    if not bench.rehearse:
        check_all_memory(bench, report)
    check_all_resumes(bench, report)
    if bench.rehearse or bench.gpus > 1:
        check_all_layouts(bench, report)
    check_all_speeds(bench, report)
    if not bench.rehearse and report.selects("release"):
        report.tell("release", lambda: check_release(before))
    if not report.end():
        return EXIT_BROKEN
    return EXIT_NO_GPU if bench.rehearse else EXIT_WELL


def end_runs_when_asked(temporary: Path) -> None:
    """Leave no run behind on the GPUs when this process is told to end."""

    def leave(number: int, _: FrameType | None) -> None:
        STARTING.acquire()  # no other thread starts one more
        kill_all(psutil.Process().children(recursive=True))
        shutil.rmtree(temporary, ignore_errors=True)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for all that was seen, as one JSON object")
    only = 'a part of the names of the checks to make, such as "layouts: fsdp"; may be given several times'
    parser.add_argument("--only", action="append", default=[], help=only)
    parser.add_argument("--at-a-time", type=int, default=3, help="runs beside each other where only numbers count")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which is kept")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, and only what needs no GPU")
    asked = parser.parse_args()
    hardware = find_hardware()
    rehearse = asked.rehearse or not hardware.gpus
    if not hardware.gpus:
        print("this host has no GPU that this process may use (CUDA_VISIBLE_DEVICES): a rehearsal on the CPU")
    if rehearse:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = "the CPU" if rehearse else f"{len(hardware.gpus)} x {hardware.gpus[0].name}"
    print(f"on {device}; flash-attn {'is' if hardware.has_flash_attention else 'is not'} installed", flush=True)
    flash = not rehearse and hardware.has_flash_attention and hardware.gpus[0].runs_flash_attention
    report = Report(describe_host(hardware), rehearsal=rehearse, only=asked.only, path=asked.json)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        end_runs_when_asked(Path(temporary))
        gpus = 0 if rehearse else len(hardware.gpus)
        return check_all(Bench(folder, rehearse, gpus, flash, asked.at_a_time), report)


if __name__ == "__main__":
    sys.exit(main())
