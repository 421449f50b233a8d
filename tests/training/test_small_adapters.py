"""IA3, prefix and prompt tuning: what they train, what they compute, and that they are resumed and load with peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
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
from transformers import AutoModelForCausalLM

from tests.tiny import CONTEXT_TOKENS, make_model, make_plan, save_model
from training.adapter import Adapter
from training.errors import SpecError
from training.rank.data import Example
from training.rank.loss import compute_logits, make_batch, score
from training.rank.model import build_model, load_config, make_facts
from training.rank.source import find_source
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from training.spec import parse_spec

CPU = torch.device("cpu")
ROW = Example(1, list(range(5, 30)), [-100] * 10 + list(range(15, 30)))
KINDS: dict[str, dict[str, Any]] = {
    "ia3": {"type": "ia3"},
    "ia3 on all": {"type": "ia3", "target_modules": "all-linear"},
    "prefix": {"type": "prefix", "num_virtual_tokens": 5},
    "prompt": {"type": "prompt", "num_virtual_tokens": 5},
}


def make_adapter(**fields: Any) -> Adapter:
    return Adapter.model_validate(fields)


def logits_of(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ROW.input_ids]), use_cache=False).logits[0, -len(ROW.input_ids) :]
    model.train(training)
    return logits


@pytest.mark.parametrize(
    ("adapter", "param", "said"),
    [
        ({"type": "ia3", "r": 4}, "adapter.r", 'belongs to lora; leave it out with type "ia3"'),
        ({"type": "prefix", "target_modules": ["q"]}, "adapter.target_modules", 'leave it out with type "prefix"'),
        ({"num_virtual_tokens": 4}, "adapter.num_virtual_tokens", "belongs to prefix"),
        ({"type": "prompt", "num_virtual_tokens": 0}, "adapter.num_virtual_tokens", "from 1 to 1024"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(adapter: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        parse_spec({"model": "base", "training_file": "rows.jsonl", "adapter": adapter})
    assert refused.value.param == param


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_what_peft_trains(family: str, kind: str, tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base", family)))
    adapter = make_adapter(**KINDS[kind])
    model = build_model(source, make_plan(), adapter)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert make_facts(source, load_config(source), adapter).trained_parameters == sum(w.numel() for w in trained)
    assert {weight.dtype for weight in trained} == {torch.float32}


def test_ia3_scales_keys_values_and_the_inside_of_the_feed_forward_part(tmp_path: Path) -> None:
    """Two layers of 16 keys, 16 values (two heads of 8) and 64 inner numbers."""
    source = find_source(str(save_model(tmp_path / "base")))
    assert make_facts(source, load_config(source), make_adapter(type="ia3")).trained_parameters == 2 * (16 + 16 + 64)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["ia3", "ia3 on all"])
def test_ia3_begins_as_the_base(family: str, kind: str, tmp_path: Path) -> None:
    source = find_source(str(save_model(tmp_path / "base", family)))
    model = build_model(source, make_plan(), make_adapter(**KINDS[kind]))
    with torch.no_grad():
        got = compute_logits(model, make_batch([ROW], CPU))
        assert torch.equal(got, compute_logits(make_model(family), make_batch([ROW], CPU)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_is_embeddings_before_the_row(family: str, tmp_path: Path) -> None:
    adapter = make_adapter(**KINDS["prompt"])
    model = build_model(find_source(str(save_model(tmp_path / "base", family))), make_plan(), adapter)
    (prompt,) = (weight for weight in model.parameters() if weight.requires_grad)
    plain = make_model(family)
    batch = make_batch([ROW], CPU)
    with torch.no_grad():
        got = compute_logits(model, batch)
        row = plain.get_input_embeddings()(torch.tensor([ROW.input_ids]))
        want = plain(inputs_embeds=torch.cat([prompt[None], row], dim=1), use_cache=False).logits[0, 5:]
        begun = plain.get_input_embeddings().weight
    assert torch.allclose(got, want[batch.kept], atol=1e-5)
    assert all(bool((begun == token).all(1).any()) for token in prompt)


def test_a_prefix_is_seen_by_the_row(tmp_path: Path) -> None:
    adapter = make_adapter(**KINDS["prefix"])
    model = build_model(find_source(str(save_model(tmp_path / "base"))), make_plan(), adapter)
    (prefix,) = (weight for weight in model.parameters() if weight.requires_grad)
    score(model, make_batch([ROW], CPU))[0].backward()
    assert bool(prefix.grad.any())
    assert prefix.grad.shape == (5, 2 * 2 * 16)


@pytest.fixture
def live_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the model answered each time its weights were about to be written as the result."""
    return watch_results(monkeypatch, logits_of)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit_and_peft_alone_loads_what_it_made(
    kind: str, family: str, tmp_path: Path, live_logits: list[torch.Tensor]
) -> None:
    body = make_job(tmp_path, family=family, adapter=KINDS[kind])
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert 0 < last_event(tmp_path / "run").step < 6
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    adapter = tmp_path / "whole" / "adapter"
    assert same_weights(tmp_path / "run" / "adapter", adapter)
    saved = sum(weight.numel() for weight in weights_of(adapter).values())
    assert saved == read_json(tmp_path / "whole" / "plan.json")["trained_parameters"]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter)
    assert torch.equal(logits_of(loaded), live_logits[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_the_same_rows_falls(kind: str, tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter=KINDS[kind], hyper={"batch_size": 10, "n_epochs": 8, "learning_rate": 0.03})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    losses = [event.data["train_loss"] for event in events_of(tmp_path / "run", "metrics")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_rows_get_a_pass_each_and_leave_room_for_what_stands_before_them(kind: str, tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter=KINDS[kind], hyper={"max_steps": 1, "n_epochs": "auto", "micro_batch_size": 2})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    assert [event.data["code"] for event in events_of(tmp_path / "run", "warning")] == ["row_by_row"]
    body["method"]["supervised"]["hyperparameters"]["max_seq_len"] = CONTEXT_TOKENS - 4
    assert train_here(tmp_path / "long", body) == EXIT_FAILED
    assert f"more than the {CONTEXT_TOKENS - 5} tokens" in last_event(tmp_path / "long").data["message"]


def test_a_prefix_and_gradient_checkpointing_are_refused_together(tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter=KINDS["prefix"], gradient_checkpointing=True)
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    assert last_event(tmp_path / "run").data["param"] == "gradient_checkpointing"
