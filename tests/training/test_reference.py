"""Preferences after supervised training: compared with the adapter that the job starts with, which stays as it was."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from preferences import build_trl, make_fresh, make_pairs, split, tune
from tiny_runs import StopAtCheck, curve_of, events_of, last_event, make_job, same_weights, train_here, weights_of
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import save_model
from training.rank import loop
from training.rank.data import Example, Labelled, Pair, prepare_labelled, prepare_pairs
from training.rank.dpo import Dpo
from training.rank.objective import Window
from training.rank.reference import add_reference, as_reference
from training.rundir import EXIT_FINISHED, EXIT_STOPPED

BETA = 0.5
SFT = {"n_epochs": 2, "learning_rate": 0.02, "lr_scheduler": "constant"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"dropout": 0.2},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True, "dropout": 0.2},
    "head": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "embeddings": {"modules_to_save": ["embed_tokens", "norm"]},
}


def train_start(folder: Path, **job: Any) -> Path:
    assert train_here(folder / "sft", make_job(folder, hyper=SFT, **job)) == EXIT_FINISHED
    return folder / "sft"


def job_from(start: Path, method: str, *, hyper: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    hyper = {"beta": BETA, "learning_rate": 2e-3, **(hyper or {})}
    return make_job(start.parent, method=method, hyper=hyper, resume_from=str(start), **more)


def log_p(model: Any, row: Example) -> float:
    """Of the answer, by hand."""
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=torch.tensor([row.input_ids])).logits[0].double(), -1)
    return sum(float(scores[at, token]) for at, token in enumerate(row.labels[1:]) if token != -100)


def load(folder: Path, adapter: Path | None) -> Any:
    """With peft alone."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return (PeftModel.from_pretrained(base, adapter) if adapter else base).eval()


def read_rows(folder: Path, file: str, method: str) -> tuple[list[Example], list[Example]]:
    """Chosen and rejected answers of a file."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    read = {"dpo": prepare_pairs, "kto": prepare_labelled}[method]
    rows = read(folder / file, tokenizer, max_seq_len=256, truncation="truncate").examples
    pairs = [row for row in rows if isinstance(row, Pair)]
    labelled = [row for row in rows if isinstance(row, Labelled)]
    return (
        [pair.chosen for pair in pairs] + [row.row for row in labelled if row.is_desirable],
        [pair.rejected for pair in pairs] + [row.row for row in labelled if not row.is_desirable],
    )


def rewards_by_hand(path: Path, reference: Path | None, method: str) -> dict[str, float]:
    """Of the validation file: beta x log(result / reference), both loaded with peft alone."""
    folder = path.parent
    result, start = load(folder, path / "adapter"), load(folder, reference)
    sides = dict(zip(("chosen", "rejected"), read_rows(folder, "validation.jsonl", method), strict=True))
    return {
        f"eval_rewards_{side}": BETA * sum(log_p(result, row) - log_p(start, row) for row in rows) / len(rows)
        for side, rows in sides.items()
    }


def last_rewards(path: Path) -> dict[str, float]:
    data = events_of(path, "evaluated")[-1].data
    return {name: data[name] for name in ("eval_rewards_chosen", "eval_rewards_rejected")}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_reference_is_the_start_and_stays_frozen(method: str, kind: str, tied: bool, tmp_path: Path) -> None:
    start = train_start(tmp_path, adapter=KINDS[kind], tied=tied)
    before = weights_of(start / "adapter")
    path = tmp_path / "run"
    assert train_here(path, job_from(start, method, adapter=KINDS[kind])) == EXIT_FINISHED
    assert not same_weights(path / "adapter", start / "adapter")
    assert weights_of(path / "adapter").keys() == before.keys(), "the reference is not handed on"
    got = last_rewards(path)
    assert got == pytest.approx(rewards_by_hand(path, start / "adapter", method), rel=1e-3, abs=1e-4)
    assert got != pytest.approx(rewards_by_hand(path, None, method), rel=0.1), "the base would be seen"


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_first_step_has_the_answers_of_the_start_and_no_reward(kind: str, tmp_path: Path) -> None:
    start = train_start(tmp_path, adapter={"type": kind})
    body = job_from(start, "dpo", hyper={"batch_size": 10}, adapter={"type": kind})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    first = events_of(tmp_path / "run", "metrics")[0].data
    assert first["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (first["rewards_chosen"], first["rewards_rejected"]) == (0.0, 0.0)
    if kind == "lora":
        chosen, _ = read_rows(tmp_path, "rows.jsonl", "dpo")
        by_hand = [log_p(load(tmp_path, start / "adapter"), row) for row in chosen]
        assert first["logps_chosen"] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("dpo", {"adapter": {"dropout": 0.3}}),
        ("kto", {"adapter": {"dropout": 0.3}}),
        ("dpo", {"adapter": {"dropout": 0.3}, "precision": "bf16"}),
        ("dpo", {"adapter": {"type": "qlora", "dropout": 0.3}}),
        ("dpo", {"adapter": {"modules_to_save": ["lm_head"], "dropout": 0.3}, "gradient_checkpointing": True}),
    ],
    ids=["dpo", "kto", "bf16", "qlora", "head, checkpointed"],
)
def test_an_interrupted_run_has_the_same_reference_again(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    start = train_start(tmp_path, adapter=more["adapter"])
    body, path = job_from(start, method, **more), tmp_path / "run"
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(path, body, stop=lambda run_dir: StopAtCheck(run_dir, 15)) == EXIT_STOPPED
    assert 0 < last_event(path).step < 6
    assert train_here(path, body, attempt=2) == EXIT_FINISHED
    assert curve_of(path) == curve_of(tmp_path / "whole")
    assert same_weights(path / "adapter", tmp_path / "whole" / "adapter")


def test_a_run_that_goes_back_has_the_same_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = train_start(tmp_path)
    healthy, left = loop.learning_rate_at, [3]
    monkeypatch.setattr(
        loop,
        "learning_rate_at",
        lambda step, plan: math.inf if step in left and not left.remove(step) else healthy(step, plan),
    )
    path = tmp_path / "run"
    assert train_here(path, job_from(start, "dpo", stability={"on_nan": "rollback"})) == EXIT_FINISHED
    assert [event.data["action"] for event in events_of(path, "warning")] == ["rollback"]
    assert last_rewards(path) == pytest.approx(rewards_by_hand(path, start / "adapter", "dpo"), rel=1e-3, abs=1e-4)


def test_loss_and_gradient_are_those_of_trl_whose_reference_is_an_adapter_too(tmp_path: Path) -> None:
    """TRL keeps a copy of the adapter that a model comes with."""
    model = tune(make_fresh()).eval()
    model.save_pretrained(tmp_path / "start")
    ours = copy.deepcopy(model)
    trl = build_trl("DPO", model, tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2, beta=0.3)
    add_reference(ours, tmp_path / "start")
    for changed in (model, ours):
        for number, weight in enumerate(w for name, w in changed.named_parameters() if ".lora_A.default" in name):
            nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(number))
    pairs = make_pairs(5)
    batch = trl.data_collator(
        [
            {
                "prompt_ids": split(pair.chosen)[0],
                "chosen_ids": split(pair.chosen)[1],
                "rejected_ids": split(pair.rejected)[1],
            }
            for pair in pairs
        ]
    )
    scores = Dpo("truncate", beta=0.3).score(ours, pairs, Window(5))
    (scores.loss / 5).backward()
    model.zero_grad()
    loss = trl.compute_loss(trl.model, batch)
    loss.backward()
    assert scores.loss.item() / 5 == pytest.approx(loss.item(), rel=1e-5)
    assert abs(loss.item() - math.log(2)) > 0.02
    want = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    got = {name: weight.grad for name, weight in ours.named_parameters() if weight.grad is not None}
    assert got.keys() == want.keys() and len(got) == 8
    assert all(torch.allclose(got[name], want[name], atol=1e-5) for name in want)


def test_to_compare_leaves_the_trained_adapter_at_work_and_its_gradients(tmp_path: Path) -> None:
    model = tune(make_fresh()).train()
    model.save_pretrained(tmp_path / "start")
    add_reference(model, tmp_path / "start")
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(".default." in name for name in trained)
    for weight in trained.values():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(KeyError), torch.no_grad(), as_reference(model):
        raise KeyError
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == trained.keys()
    assert all(bool((weight.grad == 1).all()) for weight in trained.values())


def test_the_reference_is_fp32_over_a_base_in_16_bits(tmp_path: Path) -> None:
    save_model(tmp_path / "base", dtype=torch.bfloat16)
    adapter = {"modules_to_save": ["norm"], "target_modules": ["q_proj"]}
    start = train_start(tmp_path, adapter=adapter, precision="bf16")
    body = job_from(start, "dpo", hyper={"max_steps": 1, "n_epochs": "auto"}, adapter=adapter, precision="bf16")
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    first = events_of(tmp_path / "run", "metrics")[0].data
    assert (first["rewards_chosen"], first["rewards_rejected"]) == (0.0, 0.0), "one rounded weight would be seen"
