"""Direct preference optimization: the loss of the paper, and of TRL, whatever the cuts."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preferences import build_trl, make_adapted, make_fresh, make_pairs, make_row, split, tune
from torch import nn

from tests.tiny import make_plan
from training.rank.data import Pair
from training.rank.dpo import Dpo
from training.rank.evaluate import evaluate
from training.rank.head import find_head
from training.rank.objective import Window
from training.rank.order import cut
from training.rank.parallel import SingleDevice
from training.rank.passes import PassLimit, Scores

OBJECTIVE = Dpo("truncate", beta=0.3)
PAIRS = make_pairs(5)


def train_pass(model: Any, size: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of a window in passes of `size` pairs."""
    model.zero_grad()
    window = Window(len(PAIRS))
    sums: dict[str, float] = {}
    for part in cut(PAIRS, size):
        scores = OBJECTIVE.score(model, part, window)
        (scores.loss / window.weight).backward()
        for name, value in {"loss": scores.loss, **scores.sums}.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    metrics = {"loss": sums["loss"] / len(PAIRS), **OBJECTIVE.make_metrics(sums, window)}
    return metrics, {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


class Table(nn.Module):
    """A model whose logits are written by hand: those of the next token depend on the last one alone."""

    def __init__(self, tuned: list[list[float]], base: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(tuned))
        self.base = torch.tensor(base)
        self.is_adapted = True

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=(self.weight if self.is_adapted else self.base)[input_ids])

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.is_adapted = False
        yield
        self.is_adapted = True


TUNED = [[0.0, 1.0, -1.0], [0.5, 0.0, 2.0], [-0.5, 0.3, 0.1]]
BASE = [[0.2, 0.4, 0.6], [1.0, -1.0, 0.0], [0.0, 0.0, 0.7]]


def log_p(table: list[list[float]], tokens: list[int], first: int) -> float:
    """By hand: the log-probability of the tokens from `first` on."""
    total = 0.0
    for before, token in pairwise(tokens[first - 1 :]):
        total += table[before][token] - math.log(sum(math.exp(logit) for logit in table[before]))
    return total


def test_the_loss_is_the_formula_of_the_paper_on_logits_made_by_hand() -> None:
    answers = [([0, 2], [1, 2, 0], [2, 2]), ([1], [0], [2, 1, 1])]
    pairs = [Pair(make_row(1, prompt, chosen), make_row(1, prompt, rejected)) for prompt, chosen, rejected in answers]
    scores = OBJECTIVE.score(Table(TUNED, BASE), pairs, Window(2))
    want = []
    for prompt, chosen, rejected in answers:
        ratios = [
            log_p(TUNED, [*prompt, *answer], len(prompt)) - log_p(BASE, [*prompt, *answer], len(prompt))
            for answer in (chosen, rejected)
        ]
        want.append(-math.log(1 / (1 + math.exp(-0.3 * (ratios[0] - ratios[1])))))
    assert scores.loss.item() == pytest.approx(sum(want), rel=1e-6)


def test_the_gradient_is_that_of_the_paper() -> None:
    """Section 4: -beta x sigmoid(rejected reward - chosen reward) x (grad log p(chosen) - grad log p(rejected))."""
    prompt, chosen, rejected = [0, 2], [1, 2, 0], [2, 2]
    model = Table(TUNED, BASE)
    pair = Pair(make_row(1, prompt, chosen), make_row(1, prompt, rejected))
    scores = OBJECTIVE.score(model, [pair], Window(1))
    scores.loss.backward()
    log_ps = torch.log_softmax(model.weight, -1)
    tokens = [[*prompt, *answer] for answer in (chosen, rejected)]
    by_side = [sum(log_ps[b, t] for b, t in pairwise(side[1:])) for side in tokens]
    (slope,) = torch.autograd.grad(by_side[0] - by_side[1], model.weight)
    margin = scores.sums["reward_margin"].item()
    want = -0.3 / (1 + math.exp(margin)) * slope
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, want, atol=1e-6)


def test_loss_metrics_and_gradient_are_those_of_trl(tmp_path: Path) -> None:
    model = make_fresh().eval()
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2
    trl = build_trl("DPO", model, tmp_path, rows, beta=0.3, max_length=None)
    tune(model)
    batch = trl.data_collator(
        [
            {
                "prompt_ids": split(pair.chosen)[0],
                "chosen_ids": split(pair.chosen)[1],
                "rejected_ids": split(pair.rejected)[1],
            }
            for pair in PAIRS
        ]
    )
    metrics, gradients = train_pass(model, len(PAIRS))
    model.zero_grad()
    loss = trl.compute_loss(trl.model, batch)
    loss.backward()
    theirs = trl._metrics["eval"]
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert abs(metrics["loss"] - math.log(2)) > 0.05
    for ours, name in {
        "rewards_chosen": "rewards/chosen",
        "rewards_rejected": "rewards/rejected",
        "reward_accuracy": "rewards/accuracies",
        "reward_margin": "rewards/margins",
        "logps_chosen": "logps/chosen",
        "logps_rejected": "logps/rejected",
    }.items():
        assert metrics[ours] == pytest.approx(theirs[name][-1], rel=1e-4), ours
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(gradients[name], weight.grad, atol=1e-5), name
    assert len(gradients) == 8


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_cuts_of_a_window_change_nothing(size: int) -> None:
    model = make_adapted()
    want, want_gradients = train_pass(model, 1)
    got, gradients = train_pass(model, size)
    assert got == pytest.approx(want, rel=1e-5, abs=2e-6)
    for name, gradient in want_gradients.items():
        assert torch.allclose(gradients[name], gradient, atol=1e-6), name


def test_a_fresh_adapter_begins_at_log_2_exactly() -> None:
    model = make_fresh()
    scores = OBJECTIVE.score(model, PAIRS, Window(5))
    assert scores.loss.item() == pytest.approx(5 * math.log(2), rel=1e-6)
    assert scores.sums["rewards_chosen"].item() == 0.0


def test_the_reference_is_the_base_without_dropout_and_draws_no_random_numbers() -> None:
    model = make_adapted(dropout=0.5).train()

    def score() -> Scores:
        torch.manual_seed(3)
        return OBJECTIVE.score(model, PAIRS[:1], Window(1))

    pair = PAIRS[0]
    first = score()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    logps = {}
    for side, row in {"chosen": pair.chosen, "rejected": pair.rejected}.items():
        answer = torch.tensor(split(row)[1])
        logits = model(input_ids=torch.tensor([row.input_ids])[:, :-1]).logits[0, -len(answer) :]
        logps[side] = float(torch.log_softmax(logits, -1).gather(1, answer[:, None]).sum().detach())
    assert torch.equal(torch.get_rng_state(), state)
    assert first.sums["logps_chosen"].item() == pytest.approx(logps["chosen"], rel=1e-5)
    base = model.get_base_model().eval()
    with torch.no_grad(), model.disable_adapter():
        answer = torch.tensor(split(pair.chosen)[1])
        logits = base(input_ids=torch.tensor([pair.chosen.input_ids])).logits[0, -len(answer) - 1 : -1]
        reference = float(torch.log_softmax(logits, -1).gather(1, answer[:, None]).sum())
    assert first.sums["rewards_chosen"].item() == pytest.approx(0.3 * (logps["chosen"] - reference), rel=1e-4)


def test_a_pass_leaves_the_adapter_on_and_the_mode_as_it_was() -> None:
    model = make_adapted().train()
    OBJECTIVE.score(model, PAIRS[:1], Window(1))
    assert model.training
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_the_output_head_runs_on_answers_only_and_nothing_is_padded() -> None:
    model = make_adapted()
    heads: list[int] = []
    tokens: list[int] = []
    base = model.get_base_model()
    find_head(base)  # tries the model once
    base.lm_head.register_forward_hook(
        lambda _module, inputs, output: heads.append(len(output) * (output.shape != inputs[0].shape))
    )
    base.model.embed_tokens.register_forward_hook(lambda _module, _inputs, output: tokens.append(output.shape[1]))
    OBJECTIVE.score(model, PAIRS, Window(5))
    rows = [row for pair in PAIRS for row in pair.sequences]
    assert sum(heads) == 2 * sum(len(split(row)[1]) for row in rows)
    assert sum(tokens) == 2 * sum(len(row.input_ids) - 1 for row in rows)


def test_validation_gives_means_over_pairs_however_they_are_cut() -> None:
    parallel = SingleDevice(make_adapted(dropout=0.5), make_plan())
    results = [evaluate(OBJECTIVE, parallel, PAIRS, PassLimit(size), lambda: False) for size in (1, 2, 5)]
    parallel.model.eval()
    want, _ = train_pass(parallel.model, 1)
    for result in results:
        assert result is not None
        assert result.loss == pytest.approx(want["loss"], rel=1e-5)
        assert result.metrics["eval_reward_accuracy"] == want["reward_accuracy"]
        assert result.metrics["eval_reward_margin"] == pytest.approx(want["reward_margin"], rel=1e-4)
