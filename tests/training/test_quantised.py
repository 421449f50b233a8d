"""QLoRA: frozen weights in 4 or 8 bits, adapters in fp32 over them, and an adapter that fits the base as published."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_runs import (
    StopAtCheck,
    curve_of,
    events_of,
    last_event,
    make_job,
    read_json,
    same_weights,
    train_here,
    weights_of,
)
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FalconConfig

from tests.tiny import make_model, make_plan, save_model
from training.adapter import Adapter
from training.errors import SpecError
from training.memory import bits_per_weight
from training.rank.data import Example
from training.rank.loss import compute_logits, make_batch, score
from training.rank.model import build_model, load_config, make_facts
from training.rank.objective import judging
from training.rank.quantised import count_quantised
from training.rank.source import find_source
from training.rundir import EXIT_FINISHED, EXIT_STOPPED
from training.spec import parse_spec

CPU = torch.device("cpu")
ROW = Example(1, list(range(5, 30)), [-100] * 10 + list(range(15, 30)))
KINDS = [
    {},
    {"double_quant": False},
    {"quant_type": "fp4"},
    {"bits": 8},
]
IDS = ["nf4", "nf4, single", "fp4", "8 bit"]


def qlora(**fields: Any) -> Adapter:
    return Adapter.model_validate({"type": "qlora", **fields})


def build(base: Path, adapter: Adapter, **plan: Any) -> nn.Module:
    return build_model(find_source(str(base)), make_plan(**plan), adapter)


def stored_bytes(weight: Any) -> int:
    """The storage of a quantised weight with its scales, without the code books that all weights could share."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        scale = getattr(weight, "SCB", None)
        return weight.nbytes + (scale.nbytes if scale is not None else 0)
    nested = state.state2.absmax.nbytes if state.nested else 0
    return weight.nbytes + state.absmax.nbytes + nested


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


# What is asked


@pytest.mark.parametrize(
    ("adapter", "param", "said"),
    [
        ({"type": "qlora", "bits": 2}, "adapter.bits", "2 is not 4 or 8"),
        ({"type": "qlora", "bits": "4"}, "adapter.bits", "not 4 or 8"),
        ({"type": "qlora", "quant_type": "nf8"}, "adapter.quant_type", '"nf4" or "fp4"'),
        ({"type": "qlora", "double_quant": 1}, "adapter.double_quant", "1 is not true or false"),
        ({"type": "qlora", "bits": 8, "quant_type": "nf4"}, "adapter.quant_type", "belongs to 4 bits"),
        ({"type": "lora", "bits": 4}, "adapter.bits", 'belongs to qlora; leave it out with type "lora"'),
        ({"type": "full", "r": 4}, "adapter.r", 'belongs to lora; leave it out with type "full"'),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(adapter: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        parse_spec({"model": "base", "training_file": "rows.jsonl", "adapter": adapter})
    assert refused.value.param == param


# What is stored


@pytest.mark.parametrize(("fields", "bits"), [({}, 4.127), ({"double_quant": False}, 4.5), ({"bits": 8}, 8.0)])
def test_a_weight_costs_the_published_number_of_bits(fields: dict[str, Any], bits: float) -> None:
    adapter = qlora(**fields)
    assert bits_per_weight(adapter) == pytest.approx(bits, abs=5e-4)
    outputs, inputs = 4096, 2048
    torch.manual_seed(0)
    values = torch.randn(outputs, inputs)
    if adapter.bits == 8:
        weight: Any = bitsandbytes.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)
    else:
        weight = bitsandbytes.nn.Params4bit(
            values, requires_grad=False, quant_type="nf4", compress_statistics=adapter.double_quant
        )
    measured = 8 * stored_bytes(weight.to("cpu")) / (outputs * inputs)
    rows_scale = 32 / inputs if adapter.bits == 8 else 0
    assert measured == pytest.approx(bits + rows_scale, abs=5e-4)


@pytest.mark.parametrize("fields", KINDS, ids=IDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_linear_layers_are_quantised_and_adapters_are_fp32(fields: dict[str, Any], family: str, tmp_path: Path) -> None:
    path = save_model(tmp_path / "base", family)
    model = build(path, qlora(r=3, **fields))
    facts = make_facts(find_source(str(path)), load_config(find_source(str(path))), qlora(r=3, **fields))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    assert sum(weight.numel() for weight in trained) == facts.trained_parameters
    kind = bitsandbytes.nn.Linear8bitLt if fields.get("bits") == 8 else bitsandbytes.nn.Linear4bit
    quantised = [module for module in model.modules() if isinstance(module, kind)]
    assert sum(module.in_features * module.out_features for module in quantised) == facts.quantised_parameters
    stored = sum(stored_bytes(module.weight) for module in quantised)
    rows = sum(4 * module.out_features for module in quantised) if fields.get("bits") == 8 else 0
    assert stored - rows == pytest.approx(facts.quantised_parameters * bits_per_weight(qlora(**fields)) / 8, rel=0.02)
    assert all(module.weight.dtype != torch.uint8 for module in model.modules() if type(module) is nn.Embedding)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_compute_type_follows_the_precision(base: Path, precision: str) -> None:
    model = build(base, qlora(), precision=precision)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    layers = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert {layer.compute_dtype for layer in layers} == {wanted}
    assert {module.weight.dtype for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"} == {wanted}


def test_a_model_with_layers_of_its_own_kind_is_refused() -> None:
    """transformers would leave them as they are, and the plan would promise what is not."""
    config = FalconConfig(vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(SpecError, match="no layer of falcon can be quantised") as refused:
        count_quantised(model)
    assert refused.value.param == "adapter.type"


# What it computes


@pytest.mark.parametrize("fields", KINDS, ids=IDS)
def test_before_the_first_step_the_output_is_that_of_the_quantised_base(base: Path, fields: dict[str, Any]) -> None:
    adapter = qlora(**fields)
    asked = (
        BitsAndBytesConfig(load_in_8bit=True)
        if adapter.bits == 8
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=adapter.quant_type,
            bnb_4bit_use_double_quant=adapter.double_quant,
            bnb_4bit_compute_dtype=torch.float32,
        )
    )
    with torch.no_grad():
        got = compute_logits(build(base, adapter), make_batch([ROW], CPU))
        alone = AutoModelForCausalLM.from_pretrained(base, quantization_config=asked, dtype=torch.float32)
        want = compute_logits(alone.train(), make_batch([ROW], CPU))
        plain = compute_logits(make_model(), make_batch([ROW], CPU))
    assert torch.equal(got, want)
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("fields", [{}, {"bits": 8}], ids=["4 bit", "8 bit"])
@pytest.mark.parametrize("dora", [False, True], ids=["", "dora"])
def test_the_gradient_is_that_of_the_same_weights_unpacked(base: Path, fields: dict[str, Any], dora: bool) -> None:
    """Against a plain adapter over weights that were quantised and unpacked again."""
    packed = build(base, qlora(**fields, use_dora=dora))
    unpacked = save_model(base.parent / f"unpacked {fields}")
    weights = load_file(unpacked / "model.safetensors")
    for name, own in weights.items():
        if name.endswith("_proj.weight") and fields:
            whole, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(own.half())
            weights[name] = whole * scales.unsqueeze(1) / 127
        elif name.endswith("_proj.weight"):
            weight = bitsandbytes.nn.Params4bit(own.clone(), requires_grad=False, quant_type="nf4").to("cpu")
            weights[name] = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    save_file(weights, unpacked / "model.safetensors", {"format": "pt"})
    plain = build(unpacked, Adapter(use_dora=dora))
    grads = []
    for model in (packed, plain):
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
        score(model, make_batch([ROW], CPU))[0].backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-3, atol=1e-3 * float(grad.abs().max())), name
        assert bool(grad.any())


@pytest.mark.parametrize("fields", KINDS, ids=IDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_evaluation_between_changes_no_gradient(base: Path, fields: dict[str, Any], precision: str) -> None:
    """CPUs with bf16 have inference kernels for 4 bits, without a gradient; an evaluation is not to switch to them."""

    def gradients(evaluated: bool) -> list[torch.Tensor]:
        model = build(base, qlora(**fields), precision=precision)
        batch = make_batch([ROW], CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            if evaluated:
                with torch.no_grad():
                    model.eval()
                    score(model, batch)
                    model.train()
            score(model, batch)[0].backward()
        return [weight.grad for weight in model.parameters() if weight.requires_grad]

    for plain, after in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, after)


@pytest.mark.parametrize("fields", [*KINDS, {"bits": 8, "use_dora": True}], ids=[*IDS, "8 bit, dora"])
def test_what_is_trained_and_what_it_is_compared_with_are_computed_alike(base: Path, fields: dict[str, Any]) -> None:
    """On a CPU bitsandbytes has another way for 8 bits outside of training."""
    model, batch = build(base, qlora(**fields)), make_batch([ROW], CPU)
    trained = compute_logits(model, batch)
    with judging(model):
        assert torch.equal(compute_logits(model, batch), trained)


def test_gradient_checkpointing_changes_no_gradient(base: Path) -> None:
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = build(base, qlora(dropout=0.2), gradient_checkpointing=checkpointing)
        torch.manual_seed(3)
        score(model, make_batch([ROW], CPU))[0].backward()
        return [weight.grad for weight in model.parameters() if weight.requires_grad]

    for plain, checkpointed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, checkpointed)


# Whole runs


@pytest.mark.parametrize("fields", [{"dropout": 0.3}, {"bits": 8, "dropout": 0.3}], ids=["4 bit", "8 bit"])
def test_a_run_learns_is_resumed_bit_for_bit_and_its_adapter_fits_the_plain_base(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    body = make_job(tmp_path, adapter={"type": "qlora", **fields})
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    losses = [event.data["train_loss"] for event in events_of(tmp_path / "whole", "metrics")]
    assert losses[-1] < losses[0]
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert 0 < last_event(tmp_path / "run").step < 6
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "adapter", tmp_path / "whole" / "adapter")

    adapter = tmp_path / "whole" / "adapter"
    assert {weight.dtype for weight in weights_of(adapter).values()} == {torch.float32}
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter)
    assert weights_of(adapter).keys() == {
        name.replace(".default", "") for name in plain.state_dict() if "lora_" in name
    }
    assert "quantization_config" not in read_json(adapter / "adapter_config.json")


def test_the_plan_forecasts_what_quantising_saves(tmp_path: Path) -> None:
    plans = {}
    for kind in ("lora", "qlora"):
        body = make_job(tmp_path, adapter={"type": kind}, hyper={"max_steps": 1, "n_epochs": "auto"})
        assert train_here(tmp_path / kind, body) == EXIT_FINISHED
        plans[kind] = read_json(tmp_path / kind / "plan.json")
    quantised = plans["qlora"]["quantised_parameters"]
    assert quantised == sum(
        module.weight.numel() for name, module in make_model().named_modules() if name.endswith("_proj")
    )
    assert plans["lora"]["quantised_parameters"] == 0
    saved = plans["lora"]["memory"]["weights_bytes"] - plans["qlora"]["memory"]["weights_bytes"]
    assert saved == pytest.approx(quantised * (32 - 4.127) / 8, rel=1e-3)


def test_in_8_bits_rows_are_computed_one_by_one(tmp_path: Path) -> None:
    """Which inputs are outliers, kept in 16 bits, is looked for over all rows of a pass."""
    body = make_job(tmp_path, adapter={"type": "qlora", "bits": 8}, hyper={"max_steps": 2, "n_epochs": "auto"})
    assert train_here(tmp_path / "one", body) == EXIT_FINISHED
    body["method"]["supervised"]["hyperparameters"]["micro_batch_size"] = 2
    assert train_here(tmp_path / "two", body) == EXIT_FINISHED
    assert [event.data["code"] for event in events_of(tmp_path / "two", "warning")] == ["row_by_row"]
    assert events_of(tmp_path / "one", "warning") == []
    assert curve_of(tmp_path / "two") == curve_of(tmp_path / "one")


@pytest.mark.parametrize(("adapter", "loaded"), [("{}", False), ('{"type": "qlora"}', True), ("3", False)])
def test_bitsandbytes_is_loaded_where_something_is_quantised_only(adapter: str, loaded: bool, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(f'{{"model": "none", "training_file": "none", "adapter": {adapter}}}')
    script = (
        "import sys; sys.argv = ['rank', sys.argv[1]]; from training.rank.__main__ import main; code = main();"
        "print(code, 'bitsandbytes' in sys.modules and sys.modules['bitsandbytes'] is None)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"1 {not loaded}"
