"""Models, rows and runs for check_gpu.py; a run is a process, started as the engine's own command starts it."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from training.errors import SpecError  # noqa: E402
from training.events import Event, read_events  # noqa: E402
from training.launch import make_command, make_environment  # noqa: E402
from training.rundir import EXIT_FINISHED, RunDir, write_json  # noqa: E402
from training.spec import parse_spec  # noqa: E402

Curve = dict[int, tuple[float, float]]

RUN_LIMIT_S = 600
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OFF: dict[str, Any] = {"gradient_checkpointing": False, "activation_offloading": False}


@dataclass(frozen=True)
class Found:
    """Of a check that is well: what it saw, in words and in numbers."""

    words: str
    numbers: dict[str, Any] = field(default_factory=dict)


class Broken(Exception):
    """A check that failed; the message says how. `code` is that of the run that failed, where one did."""

    def __init__(self, words: str, numbers: dict[str, Any] | None = None, code: str | None = None) -> None:
        super().__init__(words)
        self.numbers = numbers or {}
        self.code = code


class Skipped(Exception):
    """A check that cannot be made with this version or on this host; the message says why."""


def save_base(folder: Path, family: str = "Llama", dtype: str = "float32", **shape: Any) -> Path:
    """A model of random weights and a tokenizer with a token for each byte; one that is there is kept."""
    if (folder / "config.json").exists():
        return folder
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    transformers.utils.logging.disable_progress_bar()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    template = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)  # noqa: S106
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 264, "max_position_embeddings": 4096, "eos_token_id": 256, "pad_token_id": 256, **shape}
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_rows(method: str, count: int, letters: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(count):
        words = " ".join(f"{(number * 7 + place) % 97}" for place in range(letters // 3))
        prompt, answer, other = words[: letters // 4], words[letters // 4 : letters], words[: letters // 2]
        if method == "dpo":
            question = {"input": {"messages": [{"role": "user", "content": prompt}]}}
            sides = {"preferred_output": answer, "non_preferred_output": other}
            rows.append(question | {side: [{"role": "assistant", "content": text}] for side, text in sides.items()})
        else:
            row = {"prompt": prompt, "completion": answer}
            rows.append(row | {"label": number % 2 == 0} if method == "kto" else row)
    return rows


STARTING = threading.RLock()
"""Held while a run is started, and for good by whoever ends all of them."""


@dataclass(frozen=True)
class Bench:
    """Where runs are made and on what."""

    folder: Path
    rehearse: bool
    gpus: int = 0
    flash: bool = False
    "Whether flash-attn runs here."
    at_a_time: int = 1
    "Runs beside each other where only numbers count."

    def make_body(self, base: str, method: str, hyper: dict[str, Any], **more: Any) -> dict[str, Any]:
        numbers = {
            "max_steps": 5,
            "batch_size": 4,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            **hyper,
        }
        if numbers.get("packing"):
            numbers |= {"micro_batch_size": 1, "max_seq_len": 512}
        rows = self.folder / f"{base}-{method}.jsonl"
        return {
            "model": str(self.folder / base),
            "training_file": str(rows),
            "method": {"type": method, method: {"hyperparameters": numbers}},
            "seed": 1,
            **({"resources": {"gpus": 0}} if self.rehearse else {}),
            **more,
        }

    def start(self, name: str, body: dict[str, Any], attempt: int = 1) -> tuple[RunDir, subprocess.Popen[bytes]]:
        """Raises Broken or Skipped where the body is refused."""
        require_offered(body)
        run_dir = RunDir(self.folder / "runs" / re.sub(r"\W+", "-", name))
        with STARTING:
            if attempt == 1:
                shutil.rmtree(run_dir.path, ignore_errors=True)  # of an earlier check in a folder that is kept
            run_dir.path.mkdir(parents=True, exist_ok=True)
            write_json(run_dir.spec, body)
            environment = make_environment({**os.environ, "PYTHONPATH": str(ROOT)}, offline=True)
            with run_dir.log.open("ab") as log:
                command = make_command(run_dir.path, attempt)
                return run_dir, subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def run(self, name: str, body: dict[str, Any], attempt: int = 1) -> RunDir:
        """Raises Broken where the run does not come to its end."""
        run_dir, process = self.start(name, body, attempt)
        try:
            code = process.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"it was not through after {RUN_LIMIT_S} s; see {run_dir.log}") from None
        finally:
            end(process)
        if code != EXIT_FINISHED:
            raise make_broken(run_dir)
        return run_dir


def require_offered(body: dict[str, Any]) -> None:
    """Raises Skipped for what this version does not offer: a layout, or one for quantised weights. Broken for any other
    body that is refused."""
    try:
        parse_spec(body)
    except SpecError as refused:
        quantised = body.get("adapter", {}).get("type") == "qlora" and (refused.param or "").startswith("parallelism.")
        if refused.code == "not_offered" or quantised:
            raise Skipped(refused.message) from None
        raise Broken(refused.message, code=refused.code) from None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a run that is still there, with its ranks."""
    if process.poll() is not None:
        return
    kill_all([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
    process.wait()


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def wait_for_steps(run_dir: RunDir, process: subprocess.Popen[bytes], steps: int, limit_s: float) -> bool:
    """Whether a run made so many steps before it ended, or the time was over."""
    deadline = time.monotonic() + limit_s
    while len(events_of(run_dir, "metrics")) < steps and time.monotonic() < deadline:
        if process.poll() is not None:
            return len(events_of(run_dir, "metrics")) >= steps
        time.sleep(0.02)
    return len(events_of(run_dir, "metrics")) >= steps


def events_of(run_dir: RunDir, kind: str) -> list[Event]:
    events = read_events(run_dir.events, 0)[0] if run_dir.events.exists() else []
    return [event for event in events if event.type == kind]


def make_broken(run_dir: RunDir) -> Broken:
    """Of a run that failed, with what it said."""
    failed = events_of(run_dir, "failed")
    if not failed:
        return Broken(f"it ended without a word; see {run_dir.log}")
    return Broken(failed[-1].data["message"], code=failed[-1].data["code"])


def peak_of(run_dir: RunDir) -> int:
    return max(event.data["peak_memory_bytes"] for event in events_of(run_dir, "metrics"))


def curve_of(run_dir: RunDir) -> Curve:
    """Loss and gradient norm of each step; of a step that was done twice the later attempt counts."""
    return {event.step: (event.data["train_loss"], event.data["grad_norm"]) for event in events_of(run_dir, "metrics")}


def result_of(run_dir: RunDir) -> Path:
    return run_dir.adapter if run_dir.adapter.exists() else run_dir.model
