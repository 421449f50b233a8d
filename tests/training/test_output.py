"""What a run makes loads with peft and transformers alone, and answers as the model did when the training ended."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_runs import make_job, read_json, train_here, watch_results, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import TEMPLATE, save_model
from training.rundir import EXIT_FINISHED, verify

PROMPT = list(range(40, 70))
HYPER = {"max_steps": 3, "n_epochs": "auto", "learning_rate": 0.01}


@pytest.fixture
def live_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the model answered each time its weights were about to be written; the last is the result's."""
    return watch_results(monkeypatch, logits_of)


def logits_of(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    model.train(training)
    return logits


def train(folder: Path, **job: Any) -> Path:
    assert train_here(folder / "run", make_job(folder, hyper={**HYPER, **job.pop("hyper", {})}, **job)) == EXIT_FINISHED
    return folder / "run"


LOAD_ALONE = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    print(json.dumps(model(input_ids=torch.tensor([json.loads(sys.argv[2])])).logits[0].tolist()))
assert not any(name.split(".")[0] == "training" for name in sys.modules)
"""


def test_a_fresh_process_with_peft_alone_gets_the_live_logits(tmp_path: Path, live_logits: list[torch.Tensor]) -> None:
    run = train(tmp_path)
    command = [sys.executable, "-c", LOAD_ALONE, str(run / "adapter"), json.dumps(PROMPT)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    logits = torch.tensor(json.loads(loaded.stdout.splitlines()[-1]))
    assert torch.equal(logits, live_logits[-1])


@pytest.mark.parametrize(
    ("family", "tied", "adapter"),
    [
        ("llama", False, {"alpha": 12.5, "dropout": 0.2}),
        ("llama", True, {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", False, {"target_modules": ["q_proj", "lm_head"]}),
        ("gpt2", True, {}),
        ("qwen2", True, {"target_modules": {"regex": r".*\.1\..*"}}),
    ],
)
def test_an_adapter_holds_only_what_was_trained_and_all_of_it(
    family: str, tied: bool, adapter: dict[str, Any], tmp_path: Path, live_logits: list[torch.Tensor]
) -> None:
    run = train(tmp_path, family=family, tied=tied, adapter=adapter)
    weights = weights_of(run / "adapter")
    config = read_json(run / "adapter" / "adapter_config.json")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    untouched = logits_of(base)
    model = PeftModel.from_pretrained(base, run / "adapter")
    expected = {name.replace(".default", "") for name in model.state_dict() if "lora_" in name}
    assert weights.keys() == expected
    assert all(weight.dtype == torch.float32 and bool(weight.any()) for weight in weights.values())
    assert sum(weight.numel() for weight in weights.values()) == read_json(run / "plan.json")["trained_parameters"]
    torch.testing.assert_close(logits_of(model), live_logits[-1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(untouched, live_logits[-1], atol=1e-4)
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert config["lora_alpha"] == adapter.get("alpha", 16)
    assert verify(run / "adapter") is None


HEADER_BYTES = 2**14
"""More than the names and places of a few dozen weights take."""


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["norm"]},
        {"use_dora": True},
        {"type": "qlora"},
        {"type": "ia3"},
        {"type": "prompt"},
    ],
    ids=["lora", "head adapted", "head trained", "norm", "dora", "qlora", "ia3", "prompt"],
)
def test_an_adapter_is_as_large_as_the_plan_says_and_has_no_embeddings_that_were_not_trained(
    adapter: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    run = train(tmp_path, adapter=adapter, tied=tied)
    expected = read_json(run / "plan.json")["trained_parameters"]
    if tied and adapter.get("modules_to_save") == ["lm_head"]:
        expected += 258 * 32  # trained as one, and written under both names, as peft reads it
    assert sum(weight.numel() for weight in weights_of(run / "adapter").values()) == expected
    size = (run / "adapter" / "adapter_model.safetensors").stat().st_size
    assert 4 * expected < size < 4 * expected + HEADER_BYTES < 4 * (expected + 258 * 32)


def test_the_config_of_an_adapter_lists_names_and_the_same_ones_in_each_process(tmp_path: Path) -> None:
    config = read_json(train(tmp_path) / "adapter" / "adapter_config.json")
    assert config["target_modules"] == sorted(config["target_modules"])
    assert "lm_head" not in config["target_modules"]
    assert config["inference_mode"] is True


def test_tokenizer_and_template_stand_beside_and_render_the_same(tmp_path: Path) -> None:
    run = train(tmp_path)
    messages = [{"role": "user", "content": "red\n<|end|> blue"}]
    for folder in (run / "adapter", run / "checkpoints" / "step-00000003" / "adapter"):
        shipped, own = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "base")
        assert shipped.chat_template == TEMPLATE
        rendered = [t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for t in (shipped, own)]
        assert rendered[0] == rendered[1]
        assert shipped.eos_token == own.eos_token


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_full_fine_tune_loads_with_transformers_alone(
    tied: bool, published: torch.dtype, precision: str, tmp_path: Path, live_logits: list[torch.Tensor]
) -> None:
    save_model(tmp_path / "base", tied=tied, dtype=published)
    run = train(tmp_path, adapter={"type": "full"}, precision=precision)
    model, report = AutoModelForCausalLM.from_pretrained(run / "model", dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == (published if precision != "fp32" else torch.float32)
    torch.testing.assert_close(logits_of(model), live_logits[-1], atol=1e-5, rtol=1e-5)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    assert ("lm_head.weight" in weights_of(run / "model")) is not tied
    checkpoint = weights_of(run / "checkpoints" / "step-00000003" / "model")
    assert {weight.dtype for weight in checkpoint.values()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(run / "model").chat_template == TEMPLATE


def test_a_generation_config_that_contradicts_itself_is_handed_on_as_it_is(tmp_path: Path) -> None:
    save_model(tmp_path / "base")
    published = {"do_sample": False, "temperature": 0.5, "eos_token_id": 257}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(published))
    run = train(tmp_path, adapter={"type": "full"})
    assert read_json(run / "model" / "generation_config.json") == published


def test_whoever_may_read_the_folder_may_read_every_file(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert {file.stat().st_mode & 0o044 for file in (run / "adapter").iterdir()} == {0o044}
