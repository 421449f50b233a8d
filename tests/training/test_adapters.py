"""Kinds of low-rank adapters: what they train, where they begin, what they compute, and how they are handed on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_runs import (
    StopAtCheck,
    curve_of,
    last_event,
    make_job,
    read_json,
    same_weights,
    train_here,
    watch_results,
    weights_of,
)
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny import make_model, make_plan, save_model
from training.adapter import Adapter
from training.errors import SpecError
from training.rank.data import Example
from training.rank.loss import compute_logits, make_batch
from training.rank.model import build_model, load_config, make_facts
from training.rank.optim import build_optimizer, set_rate
from training.rank.source import find_source
from training.rundir import EXIT_FINISHED, EXIT_STOPPED
from training.spec import parse_spec

CPU = torch.device("cpu")
ROW = Example(1, list(range(5, 30)), [-100] * 10 + list(range(15, 30)))
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True, "dropout": 0.2},
    "pissa": {"init": "pissa", "r": 4, "alpha": 4},
    "pissa, rslora": {"init": "pissa", "r": 4, "use_rslora": True},
    "lora+": {"lora_plus_ratio": 16.0},
    "head": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "embeddings": {"modules_to_save": ["embed_tokens", "norm"]},
    "quantised, dora": {"type": "qlora", "use_dora": True},
    "quantised, head": {"type": "qlora", "modules_to_save": ["lm_head"]},
}


def make_adapter(**fields: Any) -> Adapter:
    return Adapter.model_validate(fields)


def facts_of(base: Path, adapter: Adapter) -> Any:
    source = find_source(str(base))
    return make_facts(source, load_config(source), adapter)


def logits_of(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ROW.input_ids]), use_cache=False).logits[0]
    model.train(training)
    return logits


# What is asked


@pytest.mark.parametrize(
    ("adapter", "param", "said"),
    [
        ({"modules_to_save": "lm_head"}, "adapter.modules_to_save", "not a list of module names"),
        ({"use_dora": 1}, "adapter.use_dora", "1 is not true or false"),
        ({"lora_plus_ratio": 0}, "adapter.lora_plus_ratio", "greater than 0"),
        ({"init": "pizza"}, "adapter.init", '"default" or "pissa"'),
        ({"init": "pissa", "type": "qlora"}, "adapter.init", "qlora does not allow"),
        ({"init": "pissa", "use_dora": True}, "adapter.init", "use_dora does not allow"),
        ({"type": "full", "use_dora": True}, "adapter.use_dora", 'belongs to lora; leave it out with type "full"'),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(adapter: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        parse_spec({"model": "base", "training_file": "rows.jsonl", "adapter": adapter})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("adapter", "param", "said"),
    [
        (
            {"modules_to_save": ["lm_haed"]},
            "adapter.modules_to_save",
            '"lm_haed" fits no module .* mean lm_head',
        ),
        (
            {"modules_to_save": ["q_proj"], "target_modules": ["q_proj"]},
            "adapter.modules_to_save",
            "stands in target_modules",
        ),
        ({"modules_to_save": ["mlp"], "type": "qlora"}, "adapter.modules_to_save", "mlp is quantised"),
        ({"init": "pissa", "r": 64}, "adapter.r", "64 is more than PiSSA can take from a layer of width 16"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_before_its_weights_are_read(
    adapter: dict[str, Any], param: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        facts_of(save_model(tmp_path / "base"), make_adapter(**adapter))
    assert refused.value.param == param


# What is trained


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("adapter", "extra"),
    [
        ({"use_dora": True}, "lengths"),
        ({"init": "pissa"}, None),
        ({"modules_to_save": ["lm_head"]}, "head"),
        ({"modules_to_save": ["wte", "embed_tokens", "lm_head"]}, "embeddings"),
    ],
    ids=["dora", "pissa", "head", "embeddings"],
)
def test_the_plan_counts_what_is_trained(
    family: str, tied: bool, adapter: dict[str, Any], extra: str | None, tmp_path: Path
) -> None:
    adapter = dict(adapter)
    if "modules_to_save" in adapter:
        other = "wte" if family == "llama" else "embed_tokens"
        adapter["modules_to_save"] = [name for name in adapter["modules_to_save"] if name != other]
    base = save_model(tmp_path / "base", family, tied=tied)
    model = build_model(find_source(str(base)), make_plan(), make_adapter(r=3, **adapter))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    counted = sum(weight.numel() for weight in trained.values())
    assert facts_of(base, make_adapter(r=3, **adapter)).trained_parameters == counted
    by_hand = 0
    for layer in AutoModelForCausalLM.from_pretrained(base).modules():
        if type(layer).__name__ in ("Linear", "Conv1D") and 258 not in layer.weight.shape:
            by_hand += 3 * sum(layer.weight.shape)
            if extra == "lengths":
                by_hand += layer.weight.shape[1 if type(layer).__name__ == "Conv1D" else 0]
    embedding = 258 * 32
    by_hand += {"head": embedding, "embeddings": embedding * (1 if tied else 2)}.get(extra or "", 0)
    assert counted == by_hand
    assert {weight.dtype for weight in trained.values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_fp32_over_a_base_in_16_bits(kind: str, tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base")))
    model = build_model(source, make_plan(precision="bf16"), make_adapter(**KINDS[kind]))
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}


def test_the_second_matrices_have_their_own_rate() -> None:
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    optimizer = build_optimizer(dict(model.named_parameters()), make_plan(lora_plus_ratio=16.0, weight_decay=0.1))
    set_rate(optimizer, 0.25)
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            assert rates[id(weight)] == (4.0 if "lora_B" in name else 0.25), name
    assert len(rates) == 4


# Where they begin


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "quantised" not in kind])
def test_before_the_first_step_the_output_is_that_of_the_base(family: str, kind: str, tmp_path: Path) -> None:
    adapter = {**KINDS[kind], "dropout": 0.0}
    if family == "gpt2":
        names = {"embed_tokens": "wte", "norm": "ln_f", "q_proj": "c_attn"}
        for field in ("modules_to_save", "target_modules"):
            if field in adapter:
                adapter[field] = [names.get(name, name) for name in adapter[field]]
    base = save_model(tmp_path / "base", family)
    with torch.no_grad():
        model = build_model(find_source(str(base)), make_plan(), make_adapter(**adapter))
        got = compute_logits(model, make_batch([ROW], CPU))
        want = compute_logits(make_model(family), make_batch([ROW], CPU))
    if "init" in adapter or "use_dora" in adapter:
        assert torch.allclose(got, want, atol=2e-5 * float(want.abs().max()))
    else:
        assert torch.equal(got, want)


def test_pissa_begins_as_the_principal_part_of_the_weights(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    model = build_model(find_source(str(base)), make_plan(), make_adapter(init="pissa", r=4, alpha=6))
    published = weights_of(base)
    checked = 0
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            weight = published[f"{name.removeprefix('base_model.model.')}.weight"].double()
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
            principal = left[:, :4] @ torch.diag(values[:4]) @ right[:4]
            product = 6 / 4 * module.lora_B["default"].weight @ module.lora_A["default"].weight
            assert torch.allclose(product.double(), principal, atol=1e-5)
            assert torch.allclose(module.base_layer.weight.double(), weight - principal, atol=1e-5)
            checked += 1
    assert checked == 14


# Whole runs


@pytest.fixture
def live_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the model answered each time its weights were about to be written as the result."""
    return watch_results(monkeypatch, logits_of)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit_and_peft_alone_loads_what_it_made(
    kind: str, tied: bool, tmp_path: Path, live_logits: list[torch.Tensor]
) -> None:
    body = make_job(tmp_path, adapter=KINDS[kind], tied=tied, hyper={"learning_rate": 1e-3})
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert 0 < last_event(tmp_path / "run").step < 6
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    adapter = tmp_path / "whole" / "adapter"
    assert same_weights(tmp_path / "run" / "adapter", adapter)

    if KINDS[kind].get("type") == "qlora":
        return  # The base as published differs from the quantised one; test_quantised.py has what loads.
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    untouched = logits_of(base)
    loaded = logits_of(PeftModel.from_pretrained(copy.deepcopy(base), adapter))
    assert torch.allclose(loaded, live_logits[0], atol=1e-4 if "pissa" in kind else 1e-5)
    assert not torch.allclose(loaded, untouched, atol=1e-2)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    assert torch.allclose(logits_of(merged), live_logits[0], atol=2e-3)


def test_a_pissa_adapter_is_handed_on_as_plain_lora_of_twice_the_rank(tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter={"init": "pissa", "r": 4, "alpha": 6}, hyper={"max_steps": 1, "n_epochs": "auto"})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    config = read_json(tmp_path / "run" / "adapter" / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 12, True)
    assert all(min(weight.shape) == 8 for weight in weights_of(tmp_path / "run" / "adapter").values())


def test_a_head_that_is_trained_moves_and_the_rest_of_the_base_does_not(tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter=KINDS["head"])
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    trained, base = weights_of(tmp_path / "run" / "adapter"), weights_of(tmp_path / "base")
    whole = [name for name in trained if "lora_" not in name]
    assert whole == ["base_model.model.lm_head.weight"]
    assert not torch.equal(trained[whole[0]], base["lm_head.weight"])
    assert isinstance(make_model().lm_head, nn.Linear)
