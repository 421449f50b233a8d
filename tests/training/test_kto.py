"""Kahneman-Tversky optimization: the loss of the paper, and of TRL, whatever the cuts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from preferences import LIMIT, build_trl, make_adapted, make_fresh, make_labelled, make_row, split, tune

from tests.tiny import make_plan
from training.rank.data import Labelled
from training.rank.evaluate import evaluate
from training.rank.kto import Kto, compute_losses, make_mismatched
from training.rank.objective import Window
from training.rank.order import cut
from training.rank.parallel import SingleDevice
from training.rank.passes import ROW_BY_ROW, PassLimit

OBJECTIVE = Kto("truncate", beta=0.3, desirable_weight=1.0, undesirable_weight=1.5)
ROWS = make_labelled([True, False, True, True, False])


def open_window(model: Any, rows: list[Labelled], size: int = 1) -> Window:
    window = OBJECTIVE.open_window(SingleDevice(model, make_plan()), rows, PassLimit(size), lambda: False)
    assert window is not None
    return window


def train_pass(model: Any, size: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of a window in passes of `size` rows."""
    model.zero_grad()
    window = open_window(model, ROWS, size)
    sums: dict[str, float] = {}
    for part in cut(ROWS, size):
        scores = OBJECTIVE.score(model, part, window)
        (scores.loss / window.weight).backward()
        for name, value in {"loss": scores.loss, **scores.sums}.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    metrics = {"loss": sums["loss"] / len(ROWS), **OBJECTIVE.make_metrics(sums, window)}
    return metrics, {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("ratio", "desirable"), [(2.0, True), (-1.0, True), (2.0, False), (-1.0, False)])
def test_the_loss_is_one_minus_the_value_of_the_paper(ratio: float, desirable: bool) -> None:
    gain = ratio - 0.7 if desirable else 0.7 - ratio
    want = 1 - 1 / (1 + math.exp(-0.3 * gain))
    got = compute_losses(torch.tensor([ratio]), torch.tensor([desirable]), 0.7, 0.3)
    assert got.item() == pytest.approx(want, rel=1e-6)


def log_p(model: Any, prompt: list[int], answer: list[int], *, as_base: bool) -> float:
    """By hand, from all the logits."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *answer]])
        if as_base:
            with model.disable_adapter():
                logits = model(input_ids=ids).logits[0]
        else:
            logits = model(input_ids=ids).logits[0]
    found = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return float(found.gather(1, torch.tensor(answer)[:, None]).sum())


def test_loss_and_reference_point_are_those_of_the_paper_by_hand() -> None:
    model = make_adapted().eval()

    def ratio(prompt: list[int], answer: list[int]) -> float:
        return log_p(model, prompt, answer, as_base=False) - log_p(model, prompt, answer, as_base=True)

    parts = [split(row.row) for row in ROWS]
    answers = [answer for _, answer in parts]
    moved = [ratio(prompt, answers[number - 1]) for number, (prompt, _) in enumerate(parts)]
    reference_point = max(0.0, sum(moved) / len(moved))
    assert reference_point > 0
    losses = []
    for row, (prompt, answer) in zip(ROWS, parts, strict=True):
        gain = ratio(prompt, answer) - reference_point
        value = 1 / (1 + math.exp(-0.3 * (gain if row.is_desirable else -gain)))
        losses.append((1.0 if row.is_desirable else 1.5) * (1 - value))
    metrics, _ = train_pass(model, 1)
    assert metrics["kl"] == pytest.approx(reference_point, rel=1e-4)
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_loss_metrics_and_gradient_are_those_of_trl(tmp_path: Path) -> None:
    model = make_fresh().eval()
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    settings = {"beta": 0.3, "undesirable_weight": 1.5, "max_length": None, "per_device_train_batch_size": 2}
    trl = build_trl("KTO", model, tmp_path, rows, **settings)
    answers = [split(row.row)[1] for row in ROWS]
    tune(model)
    batch = trl.data_collator(
        [
            {
                "prompt_ids": split(row.row)[0],
                "completion_ids": answers[number],
                "KL_completion_ids": answers[number - 1],
                "label": row.is_desirable,
            }
            for number, row in enumerate(ROWS)
        ]
    )
    metrics, gradients = train_pass(model, len(ROWS))
    model.zero_grad()
    loss = trl.compute_loss(trl.model, batch)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(trl._metrics["eval"]["kl"][-1], rel=1e-4)
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


def test_the_reference_point_is_never_below_zero() -> None:
    model = make_adapted().eval()
    below = [row for row in ROWS if open_window(model, [row]).reference_point == 0.0]
    for row in below:
        prompt, (_, answer) = split(row.row)[0], split(row.following)
        assert log_p(model, prompt, answer, as_base=False) < log_p(model, prompt, answer, as_base=True)
    assert 0 < len(below) < len(ROWS)


def test_a_reference_point_that_is_not_a_number_is_not_hidden() -> None:
    model = make_adapted()
    spoilt = next(weight for name, weight in model.named_parameters() if "v_proj.lora_B" in name)
    torch.nn.init.constant_(spoilt, math.nan)
    assert math.isnan(open_window(model, ROWS).reference_point)


def test_the_reference_point_has_no_dropout() -> None:
    model = make_adapted(dropout=0.5).train()
    assert open_window(model, ROWS) == open_window(model, ROWS)
    assert model.training


def test_each_prompt_gets_the_answer_of_the_row_before_it_in_the_window() -> None:
    mismatched = make_mismatched(ROWS)
    assert [split(row)[0] for row in mismatched] == [split(row.row)[0] for row in ROWS]
    answers = [split(row.row)[1] for row in ROWS]
    assert [split(row)[1] for row in mismatched] == [answers[-1], *answers[:-1]]


def test_a_row_alone_in_its_window_gets_the_answer_of_the_row_after_it_in_the_file() -> None:
    (mismatched,) = make_mismatched(ROWS[1:2])
    assert split(mismatched) == (split(ROWS[1].row)[0], split(ROWS[2].row)[1])


def test_a_borrowed_answer_is_cut_at_the_limit_and_something_of_it_is_left() -> None:
    long, short = make_row(1, [7] * (LIMIT - 1), [1]), make_row(2, [7], [2] * 30)
    (mismatched,) = make_mismatched([Labelled(long, True, short, LIMIT)])
    assert split(mismatched) == ([7] * (LIMIT - 1), [2])


def test_equal_answers_are_as_good_as_any() -> None:
    rows = [make_row(number, [number], [5]) for number in (1, 2)]
    pair = [Labelled(rows[0], True, rows[1], LIMIT), Labelled(rows[1], False, rows[0], LIMIT)]
    model = make_adapted()
    assert math.isfinite(OBJECTIVE.score(model, pair, open_window(model, pair)).loss.item())


def test_a_window_without_one_kind_of_row_has_no_mean_of_it() -> None:
    model = make_adapted()
    rows = [ROWS[0], ROWS[2]]
    window = open_window(model, rows)
    sums = {name: value.item() for name, value in OBJECTIVE.score(model, rows, window).sums.items()}
    assert set(OBJECTIVE.make_metrics(sums, window)) == {"kl", "rewards_chosen", "logps_chosen"}


def test_a_stop_is_heard_between_the_passes_of_the_reference_point() -> None:
    asked = iter([False, False, True])
    parallel = SingleDevice(make_adapted(), make_plan())
    assert OBJECTIVE.open_window(parallel, ROWS, ROW_BY_ROW, lambda: next(asked)) is None


def test_validation_has_one_reference_point_over_all_rows() -> None:
    parallel = SingleDevice(make_adapted(dropout=0.5), make_plan())
    results = [evaluate(OBJECTIVE, parallel, ROWS, PassLimit(size), lambda: False) for size in (1, 2, 5)]
    parallel.model.eval()
    want, _ = train_pass(parallel.model, 1)
    for result in results:
        assert result is not None
        assert result.loss == pytest.approx(want["loss"], rel=1e-5)
        assert result.metrics["eval_kl"] == pytest.approx(want["kl"], rel=1e-4)
