"""Validation: weighed by tokens, without dropout, and without a trace in the training."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.tiny import make_model, make_plan, save_model
from training.adapter import Adapter
from training.rank.data import Example
from training.rank.evaluate import Evaluation, evaluate
from training.rank.model import build_model
from training.rank.parallel import SingleDevice
from training.rank.passes import ROW_BY_ROW, PassLimit
from training.rank.source import find_source
from training.rank.supervised import Supervised


def make_example(length: int, first_label: int) -> Example:
    ids = [(7 * length + 3 * place) % 250 for place in range(length)]
    return Example(length, ids, [-100] * first_label + ids[first_label:])


OBJECTIVE = Supervised("truncate", "assistant")
ROWS = [make_example(20, 19), make_example(9, 2), make_example(14, 8), make_example(5, 1), make_example(11, 4)]


@pytest.fixture
def parallel(tmp_path: Path) -> SingleDevice:
    source = find_source(str(save_model(tmp_path / "base")))
    model = build_model(source, make_plan(), Adapter(dropout=0.5))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    return SingleDevice(model, make_plan())


def evaluate_all(parallel: SingleDevice, rows_per_pass: int) -> Evaluation:
    result = evaluate(OBJECTIVE, parallel, ROWS, PassLimit(rows_per_pass), lambda: False)
    assert result is not None
    return result


def test_loss_and_accuracy_are_means_over_tokens_by_hand(tmp_path: Path) -> None:
    model = make_model()
    loss, right, count = 0.0, 0, 0
    for row in ROWS:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids])).logits[0, :-1]
        wanted = torch.tensor(row.labels[1:])
        labelled = wanted != -100
        loss += float(functional.cross_entropy(logits[labelled], wanted[labelled], reduction="sum"))
        right += int((logits[labelled].argmax(-1) == wanted[labelled]).sum())
        count += int(labelled.sum())
    result = evaluate_all(SingleDevice(model, make_plan()), 1)
    assert result.loss == pytest.approx(loss / count, rel=1e-6)
    assert result.metrics == {"eval_token_accuracy": right / count}


@pytest.mark.parametrize("rows_per_pass", [2, 3, 5])
def test_the_result_does_not_depend_on_batches(parallel: SingleDevice, rows_per_pass: int) -> None:
    want, got = evaluate_all(parallel, 1), evaluate_all(parallel, rows_per_pass)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert got.metrics == want.metrics


def test_two_evaluations_are_equal_though_the_adapter_has_dropout(parallel: SingleDevice) -> None:
    assert evaluate_all(parallel, 1) == evaluate_all(parallel, 1)


def test_train_mode_random_numbers_and_gradients_stay_as_they_were(parallel: SingleDevice) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    evaluate_all(parallel, 1)
    assert parallel.model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.grad is None for weight in parallel.model.parameters())


def test_a_stop_ends_it_without_a_result(parallel: SingleDevice) -> None:
    asked = iter([False, False, True])
    assert evaluate(OBJECTIVE, parallel, ROWS, ROW_BY_ROW, lambda: next(asked)) is None
    assert parallel.model.training
