"""The contestants beside our engine, each on the token ids that our engine trains, in the order of its windows."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.rank.inputs import load_inputs
from training.rank.order import make_window
from training.spec import load_spec

MATMUL_SECONDS = 4.0


def encode(work: Path, spec_file: Path) -> None:
    """Write the rows of every step as token ids and labels."""
    spec = load_spec(spec_file)
    inputs = load_inputs(spec, base_name=None, weights=False)
    rows = inputs.training.examples
    hyper = spec.hyper
    steps = [
        [
            {"ids": rows[row].input_ids, "labels": rows[row].labels}
            for row in make_window(len(rows), hyper.batch_size, spec.seed, step)
        ]
        for step in range(1, hyper.max_steps + 1)
    ]
    about = {"model": spec.model, "rate": spec.hyper.learning_rate, "seed": spec.seed, "steps": steps}
    (work / "encoded.json").write_text(json.dumps(about))


def plain(work: Path, out: Path) -> None:
    """What one writes by hand: rows padded to the longest of a batch, all logits, mean over the labelled tokens."""
    about = json.loads((work / "encoded.json").read_text())
    model = _build(about)
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=about["rate"], weight_decay=0.0
    )
    told: dict[str, Any] = {"first_step_at": time.time(), "losses": [], "step_s": [], "tokens": _count(about)}
    for step in about["steps"]:
        begun = time.perf_counter()
        ids, labels, mask = _pad(step)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(float(loss))
        told["step_s"].append(time.perf_counter() - begun)
    out.write_text(json.dumps(told))


def trl(work: Path, out: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    about = json.loads((work / "encoded.json").read_text())
    rows = [row for step in about["steps"] for row in step]
    data = Dataset.from_list(
        [{"input_ids": row["ids"], "completion_mask": [int(label != -100) for label in row["labels"]]} for row in rows]
    )
    config = SFTConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=len(about["steps"][0]),
        max_steps=len(about["steps"]),
        learning_rate=about["rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        completion_only_loss=True,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        seed=about["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    told: dict[str, Any] = {"losses": [], "step_s": [], "tokens": _count(about)}

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            found = super().compute_loss(*arguments, **more)
            told["losses"].append(float(found[0] if isinstance(found, tuple) else found))
            return found

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            told.setdefault("first_step_at", time.time())
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            told["step_s"].append(time.perf_counter() - self.begun)

    trainer = InOrder(
        model=_build(about),
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(about["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    out.write_text(json.dumps(told))


def matmul(_: Path, out: Path) -> None:
    """The highest rate of fp32 products, of large squares and of the shapes of the model's layers on a row."""
    shapes = [(2048, 2048, 2048), (256, 576, 1536), (256, 1536, 576), (256, 576, 576)]
    best = 0.0
    for rows, inner, columns in shapes:
        left, right = torch.randn(rows, inner), torch.randn(columns, inner)
        functional.linear(left, right)
        begun, times = time.perf_counter(), 0
        while time.perf_counter() < begun + MATMUL_SECONDS / len(shapes):
            functional.linear(left, right)
            times += 1
        best = max(best, 2 * times * rows * inner * columns / (time.perf_counter() - begun))
    out.write_text(json.dumps(best))


def _build(about: dict[str, Any]) -> Any:
    """The model with the adapter that our engine makes: same places, same seed."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(about["model"], dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
    )
    torch.manual_seed(about["seed"])
    return get_peft_model(model, config).train()


def _pad(rows: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    width = max(len(row["ids"]) for row in rows)

    def fill(values: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])

    ids = [row["ids"] for row in rows]
    return fill(ids, 0), fill([row["labels"] for row in rows], -100), fill([[1] * len(row) for row in ids], 0)


def _count(about: dict[str, Any]) -> list[int]:
    return [sum(len(row["ids"]) for row in step) for step in about["steps"]]


if __name__ == "__main__":
    {"encode": encode, "plain": plain, "trl": trl, "matmul": matmul}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
