"""The base model: what is refused, what is counted, in which types it is loaded, what LoRA is put on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.tiny import make_model, make_plan, save_model
from training.adapter import Adapter
from training.errors import ModelError, SpecError
from training.rank.data import Example
from training.rank.head import find_head
from training.rank.lora import make_targets
from training.rank.loss import compute_logits, make_batch, score
from training.rank.model import build_model, get_base, load_config, load_tokenizer, make_facts
from training.rank.source import Source, find_source

CPU = torch.device("cpu")
ROW = Example(1, list(range(5, 30)), [-100] * 10 + list(range(15, 30)))
LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))


def make_adapter(**fields: Any) -> Adapter:
    return Adapter.model_validate(fields)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def source_of(folder: Path) -> Source:
    return find_source(str(folder))


# Where models come from


def test_a_folder_is_found_and_its_digest_tells_weights_apart(base: Path, tmp_path: Path) -> None:
    same, other = save_model(tmp_path / "same"), save_model(tmp_path / "other", seed=1)
    assert source_of(base).digest == source_of(same).digest != source_of(other).digest


@pytest.mark.parametrize("name", ["no/such/folder/here", "../up", "file:///etc/passwd", "org/name/more", "nothing"])
def test_what_is_neither_a_folder_nor_a_name_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder") as refused:
        find_source(name)
    assert refused.value.param == "model"


def test_a_name_of_the_hub_that_cannot_be_fetched_says_what_to_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"some-org/some-model: cannot be fetched .*check the name, the network"):
        find_source("some-org/some-model@main")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("entry", [{"auto_map": {"AutoConfig": "x.Y"}}, {"nested": {"trust_remote_code": True}}])
def test_a_model_that_brings_code_is_refused_before_anything_of_it_runs(copy: Path, file: str, entry: Any) -> None:
    edit_json(copy / file, **entry)
    with pytest.raises(ModelError, match=f"{file} asks to run code"):
        source_of(copy)


def test_pickled_weights_are_refused_unread(copy: Path) -> None:
    torch.save({}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only pickles \(pytorch_model.bin\).*convert them to safetensors"):
        source_of(copy)


def test_quantised_weights_are_refused(copy: Path) -> None:
    edit_json(copy / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match="quantised"):
        source_of(copy)


def test_a_plan_needs_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        source_of(copy)
    assert find_source(str(copy), weights=False).folder == copy


def test_a_folder_without_a_tokenizer_is_refused(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        load_tokenizer(source_of(copy))


def test_an_unknown_kind_of_model_is_refused(copy: Path) -> None:
    edit_json(copy / "config.json", model_type="of-another-world")
    with pytest.raises(ModelError, match=r"its config.json cannot be used .*of-another-world"):
        load_config(source_of(copy))


def test_weights_that_are_not_there_are_not_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model.layers.1.mlp.up_proj.weight"):
        build_model(source_of(copy), make_plan(), make_adapter())


def test_a_weight_file_that_was_cut_off_is_refused(copy: Path) -> None:
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="its weights cannot be loaded"):
        build_model(source_of(copy), make_plan(), make_adapter())


# What LoRA is put on


def test_all_linear_is_every_linear_layer_but_the_output_head() -> None:
    assert make_targets(make_model(), make_adapter()).modules == LINEAR
    assert make_targets(make_model("gpt2"), make_adapter()).modules == ["c_attn", "c_fc", "c_proj"]


def test_a_pattern_fits_whole_names_and_is_written_out() -> None:
    pattern = {"regex": r".*layers\.0\..*(q|v)_proj"}
    targets = make_targets(make_model(), make_adapter(target_modules=pattern)).modules
    assert targets == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["q_porj"], r'"q_porj" fits no linear layer of the model; did you mean q_proj'),
        (["q_proj", "query_key_value"], r'"query_key_value" fits no linear layer of the model; the model has'),
        (["self_attn"], r'"self_attn" fits no linear layer'),
        (["input_layernorm"], r'"input_layernorm" fits no linear layer'),
        ({"regex": "q_proj"}, r'the pattern "q_proj" fits no whole name of the model; did you mean q_proj'),
    ],
)
def test_a_target_that_fits_nothing_is_refused_with_names_that_are_near(asked: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        make_targets(make_model(), make_adapter(target_modules=asked))
    assert refused.value.param == "adapter.target_modules"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("targets", ["all-linear", {"regex": r".*\.0\..*"}])
def test_the_plan_counts_as_trained_what_peft_trains(family: str, targets: Any, tmp_path: Path) -> None:
    source = source_of(save_model(tmp_path / family, family, tied=True))
    adapter = make_adapter(r=3, target_modules=targets)
    facts = make_facts(source, load_config(source), adapter)
    model = make_model(family, tied=True)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    modules = make_targets(model, adapter).modules
    peft = get_peft_model(model, LoraConfig(r=3, target_modules=modules, task_type="CAUSAL_LM"))
    assert facts.trained_parameters == peft.get_nb_trainable_parameters()[0]
    assert facts.context_tokens == 256


def test_full_fine_tuning_counts_all(base: Path) -> None:
    facts = make_facts(source_of(base), load_config(source_of(base)), make_adapter(type="full"))
    assert facts.trained_parameters == facts.parameters == sum(w.numel() for w in make_model().parameters())


# Types and the first output


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_trained_is_fp32_and_what_is_frozen_is_in_the_compute_type(
    published: torch.dtype, precision: str, tmp_path: Path
) -> None:
    source = source_of(save_model(tmp_path / "base", dtype=published))
    plan = make_plan(precision=precision)
    frozen_type = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for adapter in (make_adapter(), make_adapter(type="full")):
        model = build_model(source, plan, adapter)
        types = {(weight.requires_grad, weight.dtype) for weight in model.parameters()}
        frozen = {(False, frozen_type)} if adapter.type == "lora" else set()
        assert types == {(True, torch.float32)} | frozen
        assert model.training


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_before_the_first_step_the_output_is_that_of_the_base(family: str, tmp_path: Path) -> None:
    source = source_of(save_model(tmp_path / "base", family))
    batch = make_batch([ROW], CPU)
    with torch.no_grad():
        got = compute_logits(build_model(source, make_plan(), make_adapter(alpha=7.5)), batch)
        want = compute_logits(make_model(family), batch)
    assert torch.equal(got, want)


def test_the_seed_decides_how_adapters_begin(base: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        model = build_model(source_of(base), make_plan(seed=seed), make_adapter())
        return next(weight for name, weight in model.named_parameters() if "lora_A" in name)

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


# Gradient checkpointing


@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "full"},
        {"dropout": 0.2},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"type": "ia3"},
        {"type": "prompt"},
    ],
    ids=["full", "lora with dropout", "dora", "head", "ia3", "prompt"],
)
def test_gradient_checkpointing_changes_no_gradient(adapter: dict[str, Any], base: Path) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        plan = make_plan(gradient_checkpointing=checkpointing)
        model = build_model(source_of(base), plan, make_adapter(**adapter))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
        torch.manual_seed(3)
        score(model, make_batch([ROW], CPU))[0].backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert plain
    assert all(bool(grad.any()) for name, grad in plain.items() if "embed_tokens" not in name), "none stays at zero"


def test_gradient_checkpointing_recomputes(base: Path) -> None:
    calls = []
    model = build_model(source_of(base), make_plan(gradient_checkpointing=True), make_adapter())
    for module in model.modules():
        if type(module).__name__ == "LlamaMLP":
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    find_head(get_base(model))  # tries the model once
    calls.clear()
    score(model, make_batch([ROW], CPU))[0].backward()
    assert len(calls) == 4  # two layers, each run twice
