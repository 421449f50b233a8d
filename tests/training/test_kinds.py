"""Kinds of models beside the usual decoder: what is trained of them loads again, and what cannot be trained is told
before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_runs import events_of, last_event, make_job, read_json, train_here, watch_results
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CTRLConfig,
    DeepseekV4Config,
    ElectraConfig,
    ErnieConfig,
    FalconMambaConfig,
    InklingTextConfig,
    LagunaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MambaConfig,
    RemBertConfig,
    RwkvConfig,
    XLNetConfig,
)
from transformers.models.gemma4_unified import Gemma4UnifiedTextConfig

from tests.tiny import CONTEXT_TOKENS, EXPERTS, make_config, make_model, make_plan, make_tokenizer
from training.adapter import Adapter
from training.errors import ModelError, SpecError
from training.rank.adaptable import require_loadable
from training.rank.apart import keeps_rows_apart, looks_ahead, require_trainable
from training.rank.attention import use_rows
from training.rank.data import Example
from training.rank.lora import find_targets
from training.rank.loss import compute_logits, make_batch
from training.rank.matmuls import count_matmuls
from training.rank.model import build_model, load_config, make_facts
from training.rank.source import find_source
from training.rundir import EXIT_FAILED, EXIT_FINISHED

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 258, "bos_token_id": 257, "eos_token_id": 257, "pad_token_id": 257}
BLOCKS = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "max_position_embeddings": CONTEXT_TOKENS,
}
STATE = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
HEADS = {"head_dim": 8, "num_key_value_heads": 2}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (BertConfig, BLOCKS),
    "electra": (ElectraConfig, {**BLOCKS, "embedding_size": 32}),
    "ernie": (ErnieConfig, BLOCKS),
    "rembert": (RemBertConfig, {**BLOCKS, "input_embedding_size": 32, "output_embedding_size": 32}),
    "xlnet": (XLNetConfig, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "bert, decoder": (BertConfig, {**BLOCKS, "is_decoder": True}),
    "mamba": (MambaConfig, STATE),
    "mamba2": (Mamba2Config, {**STATE, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "falcon_mamba": (FalconMambaConfig, STATE),
    "rwkv": (RwkvConfig, {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
    "ctrl": (CTRLConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": CONTEXT_TOKENS}),
    "laguna": (LagunaConfig, {**BLOCKS, **HEADS, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "inkling": (InklingTextConfig, {**BLOCKS, **HEADS, **EXPERTS, "n_routed_experts": 4, "sliding_window": 8}),
    "deepseek_v4": (
        DeepseekV4Config,
        {
            **{**BLOCKS, **EXPERTS, "head_dim": 8, "qk_rope_head_dim": 8, "q_lora_rank": 8, "n_routed_experts": 4},
            **{"o_groups": 2, "o_lora_rank": 8, "index_head_dim": 8, "sliding_window": 8},
        },
    ),
    "gemma4_unified": (Gemma4UnifiedTextConfig, {**BLOCKS, **HEADS, "sliding_window": 8}),
}


def make_kind(kind: str) -> Any:
    config, more = KINDS[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**SHAPE, **more))


def save_kind(folder: Path, kind: str) -> Path:
    make_kind(kind).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def facts_of(folder: Path, **adapter: Any) -> Any:
    source = find_source(str(folder))
    return make_facts(source, load_config(source), Adapter.model_validate(adapter))


def train_kind(tmp_path: Path, kind: str, method: str = "supervised", **adapter: Any) -> tuple[int, dict[str, Any]]:
    save_kind(tmp_path / "base", kind)
    hyper = {"batch_size": 4, "micro_batch_size": 2, "n_epochs": 1, "learning_rate": 1e-3, "warmup_steps": 0}
    body = make_job(tmp_path, rows=4, method=method, hyper=hyper, adapter=adapter)
    return train_here(tmp_path / "run", body), last_event(tmp_path / "run").data


def logits_of(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 30)[None], use_cache=False).logits[0]
    model.train(training)
    return logits


# Models that see what they predict


@pytest.mark.parametrize(
    ("kind", "ahead"),
    [
        *((kind, True) for kind in ("bert", "electra", "ernie", "rembert", "xlnet")),
        *((kind, False) for kind in ("bert, decoder", "mamba", "mamba2", "falcon_mamba", "rwkv", "ctrl")),
        *((kind, False) for kind in ("laguna", "inkling", "deepseek_v4", "gemma4_unified")),
    ],
)
def test_a_model_looks_ahead_where_another_next_token_changes_the_logits_before_it(kind: str, ahead: bool) -> None:
    model = make_kind(kind).train()
    assert looks_ahead(model, CPU) is ahead
    assert model.training
    model.eval()
    one, other = torch.arange(3, 11)[None], torch.tensor([[3, 4, 5, 6, 7, 50, 51, 52]])
    with torch.no_grad():
        changed = model(input_ids=one).logits[0, :5] - model(input_ids=other).logits[0, :5]
    assert (float(changed.abs().max()) > 1e-5) is ahead


@pytest.mark.parametrize(
    ("method", "adapter"),
    [
        ("supervised", {"type": "lora"}),
        ("pretrain", {"type": "full"}),
        ("dpo", {"type": "qlora"}),
        ("kto", {"type": "lora"}),
        ("pretrain", {"type": "prefix"}),
        ("supervised", {"type": "prompt"}),
        ("supervised", {"type": "ia3", "target_modules": ["key", "value"]}),
    ],
)
def test_an_encoder_is_refused_whatever_is_trained(method: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    code, failure = train_kind(tmp_path, "bert", method, **adapter)
    assert (code, failure["code"], failure["param"]) == (EXIT_FAILED, "invalid_model", "model")
    assert "BertLMHeadModel is not a causal language model" in failure["message"]
    assert "set is_decoder to true" in failure["message"]
    assert not events_of(tmp_path / "run", "metrics")


def test_the_same_model_as_a_decoder_is_trained(tmp_path: Path) -> None:
    assert train_kind(tmp_path, "bert, decoder")[0] == EXIT_FINISHED


# Models that cannot be computed


def test_what_the_code_of_a_model_trips_over_is_told_of_the_model() -> None:
    class Broken(LlamaForCausalLM):
        def forward(self, *_: Any, **__: Any) -> Any:
            raise KeyError("no such expert")

    with pytest.raises(ModelError, match=r"cannot be computed: Broken fails .*no such expert"):
        require_trainable(Broken(make_config()), CPU, Adapter())
    with pytest.raises(SpecError, match=r'Broken cannot be computed with quantised weights .* set it to "lora"'):
        require_trainable(Broken(make_config()), CPU, Adapter(type="qlora"))


def test_memory_that_runs_out_is_not_told_of_the_model() -> None:
    class Large(LlamaForCausalLM):
        def forward(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        require_trainable(Large(make_config()), CPU, Adapter())


@pytest.mark.parametrize(
    ("kind", "adapter", "said"),
    [
        ("mamba", {"type": "qlora"}, "MambaForCausalLM cannot be computed with quantised weights"),
        ("rwkv", {"type": "qlora"}, "RwkvForCausalLM cannot be computed with quantised weights"),
        ("mamba", {"type": "prefix"}, "mamba has no attention"),
        ("mamba2", {"type": "prefix"}, "mamba2 has no attention"),
        ("deepseek_v4", {"type": "prefix"}, "DeepseekV4ForCausalLM cannot be computed with a prefix"),
    ],
)
def test_what_an_adapter_cannot_be_on_is_refused_by_name(
    kind: str, adapter: dict[str, Any], said: str, tmp_path: Path
) -> None:
    code, failure = train_kind(tmp_path, kind, **adapter)
    assert (code, failure["code"], failure["param"]) == (EXIT_FAILED, "invalid_value", "adapter.type")
    assert said in failure["message"]
    assert 'set it to "lora"' in failure["message"]
    assert not events_of(tmp_path / "run", "metrics")


def test_a_prompt_that_a_model_passes_by_is_refused() -> None:
    class Deaf(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            self.prompt = nn.Parameter(torch.ones(2))

        def get_base_model(self) -> Any:
            return self.base

        def forward(self, **arguments: Any) -> Any:
            found = self.base(**arguments)
            found.logits = found.logits + 0 * self.prompt.sum()
            return found

    with pytest.raises(SpecError, match=r"LlamaForCausalLM cannot be computed with a prefix .it passes it by"):
        require_trainable(Deaf(make_model().requires_grad_(False)), CPU, Adapter(type="prefix"))


# What is trained


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        *((kind, {"r": 2}) for kind in ("mamba", "mamba2", "falcon_mamba", "rwkv", "ctrl")),
        *((kind, {"r": 2}) for kind in ("laguna", "inkling", "deepseek_v4", "gemma4_unified")),
        ("mamba", {"type": "prompt"}),
    ],
)
def test_what_was_trained_loads_in_peft_alone(
    kind: str, adapter: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_results(monkeypatch, logits_of)
    code, told = train_kind(tmp_path, kind, **adapter)
    assert code == EXIT_FINISHED, told
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits_of(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    if "r" in adapter:
        report = loaded.load_adapter(tmp_path / "run" / "adapter", "default")
        assert not [name for name in report.missing_keys if "lora_" in name]
        assert not report.unexpected_keys
    found = logits_of(loaded)[-len(before) :]
    assert torch.allclose(found, seen[0][-len(before) :], atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-5)
    trained = sum(weight.numel() for name, weight in loaded.named_parameters() if "lora_" in name)
    assert trained == (read_json(tmp_path / "run" / "plan.json")["trained_parameters"] if "r" in adapter else 0)


@pytest.mark.parametrize(
    ("kind", "left_out", "taken"),
    [
        ("mamba", "out_proj", "in_proj"),
        ("laguna", "shared_experts.up_proj", "self_attn.q_proj"),
    ],
)
def test_what_peft_cannot_adapt_is_left_out_and_refused_where_it_is_named(kind: str, left_out: str, taken: str) -> None:
    model = make_kind(kind)
    assert any(name.endswith(left_out) for name, _ in model.named_modules())
    layers, _ = find_targets(model, Adapter())
    assert any(name.endswith(taken) for name in layers)
    assert not any(name.endswith(left_out) for name in layers)
    for named in ([taken, left_out], {"regex": rf".*{left_out}"}):
        with pytest.raises(SpecError, match=f"{left_out} cannot be adapted: peft") as refused:
            find_targets(model, Adapter.model_validate({"target_modules": named}))
        assert refused.value.param == "adapter.target_modules"


def test_a_layer_that_multiplies_in_groups_is_not_taken_for_a_linear_one() -> None:
    layers, _ = find_targets(make_kind("deepseek_v4"), Adapter())
    assert any(name.endswith("self_attn.o_b_proj") for name in layers)
    assert not any(name.endswith("self_attn.o_a_proj") for name in layers)


def test_an_adapter_that_would_not_load_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ModelError, match=r"peft would not find .*shared_experts.*adapter.type to \"full\""):
        require_loadable(get_peft_model(make_kind("laguna"), LoraConfig(target_modules=["shared_experts.up_proj"])))
    source = find_source(str(save_kind(tmp_path / "base", "laguna")))
    require_loadable(build_model(source, make_plan(), Adapter()))


def test_embeddings_that_are_scaled_in_place_are_traced() -> None:
    """As CTRL does it."""
    model = make_kind("ctrl").eval()
    rows = [Example(1, list(range(3, 11)), list(range(3, 11))), Example(2, list(range(19, 27)), list(range(19, 27)))]
    with torch.no_grad():
        beside = compute_logits(model, make_batch(rows, CPU))[-7:]
        alone = compute_logits(model, make_batch(rows[1:], CPU))
    assert keeps_rows_apart(model, CPU) is torch.allclose(beside, alone, atol=1e-5)


def test_a_bias_between_places_is_that_of_the_whole_pass() -> None:
    """Inkling's attention has one, which is not cut into rows."""
    rows = torch.arange(3, 19)[None]
    positions = torch.arange(8).repeat(2)[None]
    model = make_kind("inkling").eval()
    with torch.no_grad():
        before = model(input_ids=rows, position_ids=positions, use_cache=False).logits
        use_rows(model)
        after = model(input_ids=rows, position_ids=positions, use_cache=False).logits
    assert torch.allclose(after, before, atol=1e-5)


# What is counted


def test_layers_of_several_widths_are_counted_one_by_one(tmp_path: Path) -> None:
    config, more = KINDS["gemma4_unified"]
    kind = config(**SHAPE, **{**more, "num_hidden_layers": 3})
    kind.per_layer_config = {0: {"head_dim": 8}, 1: {"head_dim": 16}, 2: {"head_dim": 8}}
    kind.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config())
    model.config = kind
    assert count_matmuls(model, Adapter(), frozenset()).attention == 4 * (8 + 16 + 8)


def test_a_model_without_attention_has_no_heads(tmp_path: Path) -> None:
    facts = facts_of(save_kind(tmp_path / "base", "mamba"), type="full")
    assert (facts.attention_heads, facts.matmuls.attention) == (0, 0)


def test_positions_without_a_limit_are_no_limit(tmp_path: Path) -> None:
    assert facts_of(save_kind(tmp_path / "base", "xlnet"), type="full").context_tokens is None
