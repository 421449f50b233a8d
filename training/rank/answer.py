"""Answers of a base model and of its adapter to the same questions: `python -m training.rank.answer BASE ADAPTER`.

Reads a JSON list of questions from stdin and writes a list of {"question", "base", "tuned"} as the last line of stdout.
"""

import json
import sys
from typing import Any

import torch

from training.rank.source import find_source

MAX_ANSWER_TOKENS = 60


def answer(base: str, adapter: str, questions: list[str]) -> list[dict[str, str]]:
    """Greedy answers; `base` is a folder, a GGUF file or a name of the hub, `adapter` a folder in PEFT's layout."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter, local_files_only=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = AutoModelForCausalLM.from_pretrained(find_source(base).folder, dtype=torch.float32, local_files_only=True)
    model = PeftModel.from_pretrained(weights, adapter).to(device).eval()
    answers = []
    for question in questions:
        tuned = _generate(model, tokenizer, question)
        with model.disable_adapter():
            answers.append({"question": question, "base": _generate(model, tokenizer, question), "tuned": tuned})
    return answers


@torch.inference_mode()
def _generate(model: Any, tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    ids = model.generate(
        **prompt, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS, pad_token_id=tokenizer.eos_token_id
    )[0][prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return text if tokenizer.eos_token_id in ids else f"{text} ..."


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], sys.argv[2], json.load(sys.stdin))))
