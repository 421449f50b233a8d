"""Families of models, each through a whole run: the loss and gradient of plain transformers, and results that load."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_runs import (
    StopAtCheck,
    curve_of,
    events_of,
    last_event,
    make_job,
    read_json,
    same_weights,
    train_here,
    watch_results,
    weights_of,
)
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Llama4TextConfig, PhimoeConfig

from tests.tiny import TEMPLATE, WINDOW_TOKENS, make_model, make_plan, make_rows, make_tokenizer, save_model
from training.adapter import Adapter
from training.errors import SpecError
from training.rank.data import Example
from training.rank.lora import make_targets
from training.rank.loss import count_trained, make_batch, score
from training.rank.model import build_model, load_config, make_facts
from training.rank.order import cut
from training.rank.source import find_source
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

CPU = torch.device("cpu")
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]
FAMILIES = [
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt2", "phi", "phi3"),
    *MIXTURES,
]
TIED = {"qwen2", "gemma2", "gemma3", "gpt2", "qwen3_moe"}
MODELS = [(family, family in TIED) for family in FAMILIES] + [("llama", True), ("gemma2", False), ("mixtral", True)]
IDS = [f"{family}-{'tied' if tied else 'untied'}" for family, tied in MODELS]


def logits_of(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 30)[None], use_cache=False).logits[0]
    model.train(training)
    return logits


def row_by_row(model: Any, rows: list[tuple[list[int], list[int]]]) -> float:
    """The mean cross-entropy of the labelled tokens, from a plain forward pass for each row; leaves its gradient."""
    model.zero_grad()
    trained = sum(label != -100 for _, labels in rows for label in labels[1:])
    total = 0.0
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum") / trained
        loss.backward()
        total += float(loss.detach())
    return total


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


# Passes


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_laid_in_one_pass_have_the_loss_and_gradient_of_plain_passes_row_by_row(family: str) -> None:
    model = make_model(family, attention=None).train()
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number, length in enumerate((3 * WINDOW_TOKENS, 7, 2 * WINDOW_TOKENS, 30)):
        ids = torch.randint(0, 250, (length,), generator=generator).tolist()
        rows.append(Example(number, ids, [-100] * (length // 2) + ids[length // 2 :]))
    reference = make_model(family, attention="eager").train()
    want = row_by_row(reference, [(row.input_ids, row.labels) for row in rows])
    want_gradients = gradients_of(reference)
    assert all(bool(gradient.any()) for name, gradient in want_gradients.items() if "gate" in name)
    largest = max(float(gradient.abs().max()) for gradient in want_gradients.values())
    for size in (1, 2, 4):
        model.zero_grad()
        total = 0.0
        for part in cut(rows, size):
            loss = score(model, make_batch(part, CPU))[0] / count_trained(rows)
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(want, rel=1e-6)
        for name, gradient in gradients_of(model).items():
            assert float((gradient - want_gradients[name]).abs().max()) <= 2e-6 * max(1.0, largest), (size, name)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "phi3"])
def test_what_lies_further_back_than_the_window_is_not_seen(family: str) -> None:
    """So that the test above is one of sliding windows: with one as long as the rows the loss is another."""
    ids = torch.arange(40)[None]
    near = make_model(family, attention="eager")
    far = AutoModelForCausalLM.from_config(
        type(near.config)(**{**near.config.to_dict(), "sliding_window": 64}), attn_implementation="eager"
    )
    far.load_state_dict(near.state_dict())
    with torch.no_grad():
        one, other = (model(input_ids=ids, use_cache=False).logits[0] for model in (near, far))
    assert torch.allclose(one[:WINDOW_TOKENS], other[:WINDOW_TOKENS], atol=1e-5)
    assert not torch.allclose(one[2 * WINDOW_TOKENS :], other[2 * WINDOW_TOKENS :], atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_gradient_checkpointing_changes_no_gradient(family: str, kind: str, tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base", family)))
    ids = list(range(5, 30))
    found = []
    for checkpointing in (False, True):
        attention = "eager" if family == "gemma2" else "sdpa"
        plan = make_plan(gradient_checkpointing=checkpointing, attention=attention)
        model = build_model(source, plan, Adapter.model_validate({"type": kind}))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
        score(model, make_batch([Example(1, ids, ids)], CPU))[0].backward()
        found.append(gradients_of(model))
    plain, checkpointed = found
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert all(bool(gradient.any()) for gradient in plain.values())


# Whole runs


@dataclass(frozen=True)
class Finished:
    """A run of two steps over all rows, in passes of two rows."""

    base: Path
    path: Path
    logits: torch.Tensor
    "Of the trained model before it was written."

    @property
    def first_step(self) -> dict[str, Any]:
        return events_of(self.path, "metrics")[0].data

    @property
    def warnings(self) -> list[str]:
        return [event.data["code"] for event in events_of(self.path, "warning")]


def finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tied: bool, adapter: Any) -> Finished:
    seen = watch_results(monkeypatch, logits_of)
    hyper = {"batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3, "warmup_steps": 0}
    body = make_job(tmp_path, family=family, tied=tied, rows=4, adapter=adapter, hyper=hyper)
    del body["validation_file"]
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    return Finished(tmp_path / "base", tmp_path / "run", seen[0])


def reference_of(base: Path) -> tuple[float, Any]:
    """Loss of the first step, and the model with its gradient, by plain transformers; labels from the template."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = []
    for row in make_rows(4):
        chat = row["messages"]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        answer = tokenizer(chat[1]["content"] + "<|end|>")["input_ids"]
        end = len(asked) + len(answer)
        assert ids[len(asked) : end] == answer
        rows.append((ids, [-100] * len(asked) + answer + [-100] * (len(ids) - end)))
    assert max(len(ids) for ids, _ in rows) > 4 * WINDOW_TOKENS
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").train()
    return row_by_row(model, rows), model


@pytest.mark.parametrize(("family", "tied"), MODELS, ids=IDS)
def test_full_fine_tuning(family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = finish(tmp_path, monkeypatch, family, tied, {"type": "full"})
    loss, reference = reference_of(done.base)
    norm = torch.stack([gradient.norm() for gradient in gradients_of(reference).values()]).norm()
    assert done.first_step["train_loss"] == pytest.approx(loss, rel=1e-5)
    assert done.first_step["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert "row_by_row" not in done.warnings

    loaded, report = AutoModelForCausalLM.from_pretrained(done.path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(loaded), done.logits)
    inner, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (inner is head) is tied
    assert torch.equal(inner, head) is tied
    assert {name.rpartition(".")[0] for name in weights_of(done.path / "model")} == {
        name.rpartition(".")[0] for name in weights_of(done.base)
    }
    trained, before = loaded.state_dict(), reference.state_dict()
    for name, weight in trained.items():
        parts = (
            zip(weight, before[name], strict=True)
            if "experts" in name and weight.ndim == 3
            else [(weight, before[name])]
        )
        assert not any(torch.equal(now, then) for now, then in parts), name


def lora_size(model: Any, r: int) -> int:
    """r x (inputs + outputs) of each linear layer and each expert, by hand."""
    size = 0
    for name, weight in model.named_parameters():
        if weight.ndim == 3:
            size += r * len(weight) * (weight.shape[1] + weight.shape[2])
        elif weight.ndim == 2 and 258 not in weight.shape and not name.endswith(("mlp.gate.weight", "wpe.weight")):
            size += r * sum(weight.shape)
    return size


@pytest.mark.parametrize(("family", "tied"), [*MODELS, ("deepseek_v3", False)], ids=[*IDS, "deepseek_v3-untied"])
def test_lora(family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = finish(tmp_path, monkeypatch, family, tied, {"r": 2})
    loss, reference = reference_of(done.base)
    assert done.first_step["train_loss"] == pytest.approx(loss, rel=1e-5)
    assert "row_by_row" not in done.warnings
    plan = read_json(done.path / "plan.json")
    saved = load_file(done.path / "adapter" / "adapter_model.safetensors")
    assert plan["trained_parameters"] == sum(weight.numel() for weight in saved.values()) == lora_size(reference, 2)
    assert all(bool(weight.any()) for weight in saved.values())

    base = AutoModelForCausalLM.from_pretrained(done.base)
    untouched = logits_of(base)
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), done.path / "adapter")
    report = loaded.load_adapter(done.path / "adapter", "default")
    assert not [name for name in report.missing_keys if "lora_" in name]
    assert not report.unexpected_keys
    assert torch.allclose(logits_of(loaded), done.logits, atol=1e-5)
    assert not torch.allclose(done.logits, untouched, atol=1e-4)
    merged = logits_of(loaded.merge_and_unload())
    assert torch.allclose(merged, done.logits, atol=1e-3)
    inner, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    assert (inner is head) is tied


@pytest.mark.parametrize(
    ("family", "adapter", "param", "said"),
    [
        ("mixtral", {"dropout": 0.1}, "adapter.dropout", "experts.* belongs to a mixture of experts, which cannot"),
        ("mixtral", {"use_dora": True}, "adapter.use_dora", "cannot have it; leave the option out, or choose layers"),
        ("mixtral", {"init": "pissa", "r": 2}, "adapter.init", "cannot have it"),
        ("deepseek_v3", {"target_modules": ["up_proj"], "dropout": 0.1}, "adapter.dropout", "up_proj belongs to"),
        ("deepseek_v3", {"type": "qlora"}, "adapter.type", "leave it out of adapter.target_modules"),
        ("qwen3_moe", {"target_modules": ["up_proj"]}, "adapter.target_modules", "did you mean .*gate_up_proj"),
    ],
)
def test_what_experts_cannot_have_is_refused_by_name(
    family: str, adapter: dict[str, Any], param: str, said: str, tmp_path: Path
) -> None:
    source = find_source(str(save_model(tmp_path / "base", family)))
    with pytest.raises(SpecError, match=said) as refused:
        make_facts(source, load_config(source), Adapter.model_validate(adapter))
    assert refused.value.param == param


@pytest.mark.parametrize("layers", [["q_proj", "v_proj"], {"regex": r".*self_attn\..*"}])
def test_layers_beside_the_experts_have_every_option(layers: Any, tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base", "qwen3_moe")))
    adapter = Adapter.model_validate({"target_modules": layers, "dropout": 0.1, "use_dora": True})
    model = build_model(source, make_plan(), adapter)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".self_attn." in name for name in trained)
    facts = make_facts(source, load_config(source), adapter)
    assert facts.trained_parameters == sum(weight.numel() for weight in trained.values())


def test_experts_alone_are_named_like_layers(tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base", "mixtral")))
    adapter = Adapter.model_validate({"r": 3, "target_modules": ["experts.down_proj"]})
    model = build_model(source, make_plan(), adapter)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert make_facts(source, load_config(source), adapter).trained_parameters == trained
    assert trained == 2 * 3 * 4 * (64 + 32)


@pytest.mark.parametrize("kind", [Llama4TextConfig, PhimoeConfig])
def test_a_router_that_is_a_linear_layer_is_not_adapted(kind: Any) -> None:
    """Some give what they choose and not a product, which peft cannot add to."""
    model = AutoModelForCausalLM.from_config(
        kind(
            **{"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1},
        )
    )
    routers = {name for name, module in model.named_modules() if name.endswith("router")}
    targets = make_targets(model, Adapter())
    assert routers
    assert not any(name.endswith(tuple(targets.modules)) for name in routers)
    adapted = get_peft_model(model, LoraConfig(target_modules=targets.modules, target_parameters=targets.parameters))
    assert adapted(input_ids=torch.arange(8).unsqueeze(0)).logits.isfinite().all()


def test_experts_in_16_bits_have_adapters_in_fp32(tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base", "mixtral")))
    model = build_model(source, make_plan(precision="bf16"), Adapter())
    types = {(weight.requires_grad, weight.dtype) for weight in model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    ids = list(range(5, 30))
    with torch.autocast("cpu", torch.bfloat16):
        score(model, make_batch([Example(1, ids, ids)], CPU))[0].backward()
    seconds = {name: weight.grad for name, weight in model.named_parameters() if "lora_B" in name}
    assert all(bool(gradient.any()) for gradient in seconds.values())


def test_a_mixture_is_counted_by_what_is_computed_for_a_token(tmp_path: Path) -> None:
    widths = {}
    for family in ("mixtral", "qwen2_moe", "llama"):
        source = find_source(str(save_model(tmp_path / family, family)))
        widths[family] = make_facts(source, load_config(source), Adapter()).intermediate_size
    assert widths == {"mixtral": 2 * 64, "qwen2_moe": 2 * 16 + 32, "llama": 64}


@pytest.mark.parametrize(
    ("family", "adapter"), [("mixtral", {"type": "full"}), ("mixtral", {}), ("deepseek_v3", {}), ("gemma2", {})]
)
def test_a_stopped_run_goes_on_bit_for_bit(family: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    body = make_job(tmp_path, family=family, rows=6, adapter=adapter, hyper={"learning_rate": 1e-3})
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert 0 < last_event(tmp_path / "run").step < 4
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    name = "model" if adapter else "adapter"
    assert same_weights(tmp_path / "run" / name, tmp_path / "whole" / name)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_a_dense_layer_is_not_taken_for_the_experts_of_the_same_name(family: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", family)
    source = find_source(str(base))
    shared = "shared_expert" if family == "qwen2_moe" else "shared_experts"
    adapter = Adapter.model_validate({"r": 2, "target_modules": [f"{shared}.up_proj"]})
    model = build_model(source, make_plan(), adapter)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all(f".{shared}.up_proj.lora_" in name for name in trained)
    counted = sum(weight.numel() for weight in trained.values())
    assert make_facts(source, load_config(source), adapter).trained_parameters == counted


@pytest.mark.parametrize(("kind", "told"), [("full", 1), ("lora", 0)])
def test_a_balance_loss_that_is_asked_for_and_left_out_is_told(kind: str, told: int, tmp_path: Path) -> None:
    config = save_model(tmp_path / "base", "mixtral") / "config.json"
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    config.write_text(json.dumps({**read_json(config), **asks}))
    assert train_here(tmp_path / "run", make_job(tmp_path, rows=4, adapter={"type": kind})) == EXIT_FINISHED
    messages = [event.data["message"] for event in events_of(tmp_path / "run", "warning")]
    assert len([message for message in messages if "router_aux_loss_coef 0.02" in message]) == told


# Tokenizers


def test_a_tokenizer_without_a_pad_token_needs_none_and_gets_none(tmp_path: Path) -> None:
    curves = []
    for pad in ("<|end|>", None):
        folder = tmp_path / str(pad)
        tokenizer = make_tokenizer()
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(save_model(folder / "base"))
        body = make_job(folder, rows=4, hyper={"batch_size": 4, "micro_batch_size": 2})
        assert train_here(folder / "run", body) == EXIT_FINISHED
        assert AutoTokenizer.from_pretrained(folder / "run" / "adapter").pad_token == pad
        curves.append(curve_of(folder / "run"))
    assert curves[0] == curves[1]


def test_a_model_without_a_chat_template_says_what_to_do(tmp_path: Path) -> None:
    save_model(tmp_path / "base", template=None)
    assert train_here(tmp_path / "run", make_job(tmp_path)) == EXIT_FAILED
    failure = last_event(tmp_path / "run").data
    assert (failure["code"], failure["param"]) == ("no_chat_template", "model")
    assert "put a chat_template.jinja into its folder" in failure["message"]
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    assert train_here(tmp_path / "run", make_job(tmp_path), attempt=2) == EXIT_FINISHED
