"""Tiny models, data files and specs that tests make for themselves."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from training.facts import Counts
from training.memory import Memory
from training.plan import Plan

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 256
SPECIAL = ("<|turn|>", "<|end|>")
WORDS = [
    "red",
    "green",
    "blue",
    "round",
    "square",
    "small",
    "large",
    "soft",
    "loud",
    "quick",
    "slow",
    "north",
    "south",
    "tea",
    "salt",
    "stone",
]


WINDOW_TOKENS = 8
"""Of families whose attention looks back only so far in some layers; rows are longer."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW_TOKENS,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": WINDOW_TOKENS}),
    "phi": (PhiConfig, {}),
    "phi3": (Phi3Config, {"sliding_window": WINDOW_TOKENS}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (Qwen2MoeConfig, {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "num_experts": 4, "head_dim": 8}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **EXPERTS,
            **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            **{"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW_TOKENS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
"""Config class and what is its own, of each family; GPT-2 is made apart."""


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte and two control tokens; the pad token is the end of a turn, as in many published models."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=CONTEXT_TOKENS,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=template,
    )


def make_config(family: str = "llama", *, tied: bool = False) -> Any:
    shape: dict[str, Any] = {"vocab_size": 258, "tie_word_embeddings": tied, "eos_token_id": 257, "pad_token_id": 257}
    if family == "gpt2":
        return GPT2Config(
            **shape, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT_TOKENS, bos_token_id=257,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    kind, more = FAMILIES[family]
    return kind(
        **{
            **shape,
            "bos_token_id": 257,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_TOKENS,
            "initializer_range": 0.2,
            **more,
        }
    )


def make_model(family: str = "llama", *, tied: bool = False, seed: int = 0, attention: str | None = "sdpa") -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(make_config(family, tied=tied), attn_implementation=attention)


def save_model(
    folder: Path,
    family: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    template: str | None = TEMPLATE,
) -> Path:
    make_model(family, tied=tied, seed=seed, attention=None).to(dtype).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def make_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Chat rows of different lengths."""
    rows = []
    for number in range(start, start + count):
        asked = " ".join(WORDS[(number * 7 + place) % len(WORDS)] for place in range(1 + number % 4))
        answer = " ".join(WORDS[(number * 5 + place) % len(WORDS)] for place in range(1 + number % 3))
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    return rows


def make_pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Preference rows: of two answers to one question the chosen one says yes and repeats a word of it."""
    pairs = []
    for row in make_rows(count, start):
        question, answer = row["messages"]
        chosen = {"role": "assistant", "content": "yes " + question["content"].split()[0]}
        pairs.append(
            {"input": {"messages": [question]}, "preferred_output": [chosen], "non_preferred_output": [answer]}
        )
    return pairs


def make_labelled(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Answers of one word are undesirable."""
    return [{**row, "label": " " in row["messages"][1]["content"]} for row in make_rows(count, start)]


def make_texts(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"text": " ".join(message["content"] for message in row["messages"])} for row in make_rows(count, start)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_body(
    model: Path,
    rows: Path,
    *,
    validation: Path | None = None,
    method: str = "supervised",
    hyper: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """A create body; `hyper` are its hyperparameters."""
    body = {
        "model": str(model),
        "training_file": str(rows),
        "method": {"type": method, method: {"hyperparameters": hyper}},
        **more,
    }
    return {**body, "validation_file": str(validation)} if validation else body


def make_plan(**changes: Any) -> Plan:
    """A plan for the CPU; `changes` are what a test is about."""
    plan = Plan(
        device="cpu",
        ranks=1,
        seed=0,
        steps=20,
        steps_per_epoch=10,
        n_epochs=2,
        batch_size=4,
        micro_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=3e-4,
        lr_scheduler="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optimizer="adamw",
        max_seq_len=CONTEXT_TOKENS,
        truncation="truncate",
        train_on="assistant",
        eval_steps=None,
        save_steps=10,
        save_total_limit=10,
        precision="fp32",
        gradient_checkpointing=False,
        attention="sdpa",
        parameters=0,
        trained_parameters=0,
        memory=Memory(weights_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=0, logits_bytes=0),
        counts=Counts(rows=40, trained_rows=40),
        reasons={},
    )
    return plan.model_copy(update=changes)
