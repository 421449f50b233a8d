"""Pairs and labelled answers of made-up tokens, a model with an adapter that has been trained a little, and TRL."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import make_model, make_tokenizer
from training.rank.data import Labelled, Pair
from training.rank.sieve import Example

LIMIT = 40
SEED = 70
"""With it the mean over mismatched answers is above zero, so that its clamp does not hide it."""


def make_adapted(dropout: float = 0.0) -> Any:
    return tune(make_fresh(dropout))


def make_fresh(dropout: float = 0.0) -> Any:
    """A model with an adapter that changes nothing yet."""
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets)
    return get_peft_model(make_model(), config)


def tune(model: Any) -> Any:
    """Give the adapter weights as if it had been trained."""
    weights = [weight for name, weight in model.named_parameters() if "lora_B.default" in name]
    for number, weight in enumerate(weights):
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(SEED + number))
    return model


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_row(line: int, prompt: list[int], answer: list[int]) -> Example:
    return Example(line, [*prompt, *answer], [*[-100] * len(prompt), *answer])


def make_pairs(count: int) -> list[Pair]:
    pairs = []
    for number in range(count):
        prompt = draw(4 + number, number)
        answers = draw(3 + number % 3, 50 + number), draw(7 - number % 4, 90 + number)
        pairs.append(Pair(*(make_row(number + 1, prompt, answer) for answer in answers)))
    return pairs


def make_labelled(labels: list[bool]) -> list[Labelled]:
    rows = [
        make_row(number + 1, draw(4 + number, number), draw(3 + number % 3, 50 + number))
        for number in range(len(labels))
    ]
    return [
        Labelled(row, label, after, LIMIT) for row, label, after in zip(rows, labels, rows[1:] + rows[:1], strict=True)
    ]


def split(row: Example) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of the answer."""
    prompt = row.labels.count(-100)
    return row.input_ids[:prompt], row.input_ids[prompt:]


def build_trl(kind: str, model: Any, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    """TRL's own trainer around a model with a fresh adapter, which is its reference; its collator and its loss take
    token ids."""
    import trl
    from datasets import Dataset

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, **settings
    )
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer())
