"""A whole run against a training loop in plain PyTorch: padded batches, hand-shifted labels, torch's own AdamW, rates
written down as formulas. Whatever the cuts, both see the same losses, norms, rates and weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import curve_of, make_job, read_json, train_here, weights_of
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.rank.data import prepare
from training.rank.order import make_order
from training.rundir import EXIT_FINISHED

RATE, DECAY, NORM, BATCH = 0.01, 0.1, 0.5, 4
HYPER = {
    "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": NORM, "batch_size": BATCH, "warmup_steps": 2,
    "eval_steps": 100,
}  # fmt: skip


def pad(values: list[list[int]], filler: int) -> torch.Tensor:
    width = max(map(len, values))
    return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])


def loss_of(model: Any, rows: list[Any]) -> torch.Tensor:
    """The mean over the labelled tokens of one padded batch."""
    labels = pad([row.labels for row in rows], -100)[:, 1:]
    mask = pad([[1] * len(row.input_ids) for row in rows], 0)
    logits = model(input_ids=pad([row.input_ids for row in rows], 0), attention_mask=mask).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def rate_at(step: int, steps: int) -> float:
    """Two steps of warm-up, then a half cosine that comes to 0 when the run is over."""
    return RATE * (step / 2 if step <= 2 else 0.5 * (1 + math.cos(math.pi * (step - 3) / (steps - 2))))


def train_plainly(folder: Path, steps: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What each step measured, and the weights at the end."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    file = folder / "rows.jsonl"
    rows = prepare(file, tokenizer, max_seq_len=256, truncation="truncate", train_on="assistant").examples
    windows = [
        [rows[row] for row in order[start : start + BATCH]]
        for order in (make_order(len(rows), 0, epoch) for epoch in range(steps))
        for start in range(0, len(rows), BATCH)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    told = []
    for step, window in enumerate(windows[:steps], 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        loss = loss_of(model, window)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(weight.grad.double().square().sum()) for weight in model.parameters()))
        for weight in model.parameters():
            weight.grad *= min(1.0, NORM / norm)
        optimizer.step()
        told.append({"train_loss": float(loss.detach()), "grad_norm": norm, "learning_rate": rate_at(step, steps)})
    return told, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("micro", "length", "steps"),
    [(1, {"n_epochs": 2}, 6), (2, {"n_epochs": 2}, 6), (4, {"n_epochs": 2}, 6), (1, {"max_steps": 5}, 5)],
    ids=["1 row a pass", "2 rows", "4 rows", "max_steps"],
)
def test_a_run_is_what_a_plain_loop_computes(micro: int, length: dict[str, Any], steps: int, tmp_path: Path) -> None:
    """Ten rows of different lengths in windows of 4, 4 and 2; the norm is above the limit, and so is clipped."""
    hyper = {**HYPER, **{"n_epochs": "auto", **length}, "micro_batch_size": micro}
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper=hyper, adapter={"type": "full"})) == EXIT_FINISHED
    want, weights = train_plainly(tmp_path, steps)
    curve = {step: data for (step, kind), data in curve_of(tmp_path / "run").items() if kind == "metrics"}
    assert sorted(curve) == list(range(1, steps + 1))
    for step, measured in enumerate(want, 1):
        got = {name: curve[step][name] for name in measured}
        assert got == pytest.approx(measured, rel=1e-4), step
    assert max(data["grad_norm"] for data in want) > NORM
    trained = weights_of(tmp_path / "run" / "model")
    assert trained.keys() == weights.keys()
    for name, weight in weights.items():
        # Adam's first steps divide by the size of the gradient: where that is next to nothing, rounding decides.
        off = (trained[name] - weight).abs() > 1e-5
        assert float(off.float().mean()) < 0.01, name
    assert read_json(tmp_path / "run" / "plan.json")["steps_per_epoch"] == 3


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_the_first_gradient_is_that_of_the_whole_batch(micro: int, tmp_path: Path) -> None:
    """To 1e-6: after one step from nothing, Adam's first moment is a tenth of the gradient."""
    hyper = {
        **HYPER,
        "max_grad_norm": 0,
        "max_steps": 1,
        "n_epochs": "auto",
        "batch_size": 12,
        "micro_batch_size": micro,
    }
    body = make_job(tmp_path, rows=12, hyper=hyper, adapter={"type": "full"})
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    file, tokenizer = tmp_path / "rows.jsonl", AutoTokenizer.from_pretrained(tmp_path / "base")
    rows = prepare(file, tokenizer, max_seq_len=256, truncation="truncate", train_on="assistant").examples
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loss_of(model, list(rows)).backward()
    want = {name: weight.grad for name, weight in model.named_parameters()}
    state = torch.load(tmp_path / "run" / "checkpoints" / "step-00000001" / "state.pt", weights_only=True)
    got = {name: 10 * moments["exp_avg"] for name, moments in state["optimizer"]["state"].items()}
    assert got.keys() == want.keys()
    largest = max(float(gradient.abs().max()) for gradient in want.values())
    for name, gradient in want.items():
        assert torch.allclose(got[name], gradient, rtol=0, atol=1e-6 * max(1.0, largest))
