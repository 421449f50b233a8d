"""Small models, rows and runs for check_gpu.py; a run is a process, started as the engine's own command starts it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from training.events import Event, read_events  # noqa: E402
from training.launch import make_command, make_environment  # noqa: E402
from training.rundir import EXIT_FINISHED, RunDir, write_json  # noqa: E402

RUN_LIMIT_S = 300


class Broken(Exception):
    """A check that failed; the message says how."""


def save_base(folder: Path, **shape: int) -> Path:
    """A Llama of random weights and a tokenizer with a token for each byte."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    config = LlamaConfig(vocab_size=264, max_position_embeddings=4096, eos_token_id=256, pad_token_id=256, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


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


@dataclass(frozen=True)
class Bench:
    """Where runs are made and on what."""

    folder: Path
    rehearse: bool

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
            **more,
        }

    def start(self, name: str, body: dict[str, Any], attempt: int = 1) -> tuple[RunDir, subprocess.Popen[bytes]]:
        run_dir = RunDir(self.folder / "runs" / name.replace(" ", "-"))
        run_dir.path.mkdir(parents=True, exist_ok=True)
        write_json(run_dir.spec, body)
        environment = make_environment({**os.environ, "PYTHONPATH": str(ROOT)}, offline=True)
        with run_dir.log.open("ab") as log:
            command = make_command(run_dir.path, attempt)
            return run_dir, subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def run(self, name: str, body: dict[str, Any], attempt: int = 1) -> RunDir:
        """Raises Broken where the run does not come to its end."""
        run_dir, process = self.start(name, body, attempt)
        if process.wait(RUN_LIMIT_S) != EXIT_FINISHED:
            raise Broken(why_ended(run_dir))
        return run_dir


def events_of(run_dir: RunDir, kind: str) -> list[Event]:
    events = read_events(run_dir.events, 0)[0] if run_dir.events.exists() else []
    return [event for event in events if event.type == kind]


def why_ended(run_dir: RunDir) -> str:
    failed = events_of(run_dir, "failed")
    return failed[-1].data["message"] if failed else f"it ended without a word; see {run_dir.log}"


def curve_of(run_dir: RunDir) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step; of a step that was done twice the later attempt counts."""
    return {event.step: (event.data["train_loss"], event.data["grad_norm"]) for event in events_of(run_dir, "metrics")}


def result_of(run_dir: RunDir) -> Path:
    return run_dir.adapter if run_dir.adapter.exists() else run_dir.model
