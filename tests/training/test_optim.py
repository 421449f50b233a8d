"""Learning rates against transformers' own schedules, AdamW against its formula."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from tests.tiny import make_plan
from training.automatic import make_decay_steps
from training.errors import SpecError
from training.rank.optim import build_optimizer, learning_rate_at
from training.rank.parallel import SingleDevice, find_norm
from training.spec import Hyperparameters, parse_spec

SCHEDULES = {
    "cosine": get_cosine_schedule_with_warmup,
    "linear": get_linear_schedule_with_warmup,
    "constant": lambda optimizer, warmup, _steps: get_constant_schedule_with_warmup(optimizer, warmup),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("steps", [6, 20])
def test_after_the_warm_up_the_rate_is_that_of_transformers(schedule: str, warmup_steps: int, steps: int) -> None:
    plan = make_plan(lr_scheduler=schedule, warmup_steps=warmup_steps, steps=steps)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=plan.learning_rate)
    reference = SCHEDULES[schedule](optimizer, warmup_steps, steps)
    for step in range(1, steps + 1):
        if step > warmup_steps:
            assert learning_rate_at(step, plan) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize(("warmup_steps", "decay_steps"), [(0, 4), (5, 10), (3, 0), (2, 18)])
def test_wsd_is_that_of_transformers_with_its_decay_by_the_square_root(warmup_steps: int, decay_steps: int) -> None:
    plan = make_plan(lr_scheduler="wsd", warmup_steps=warmup_steps, decay_steps=decay_steps, steps=20)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=plan.learning_rate)
    reference = get_wsd_schedule(optimizer, warmup_steps, decay_steps, num_training_steps=20, decay_type="1-sqrt")
    for step in range(1, 21):
        if step > warmup_steps:
            assert learning_rate_at(step, plan) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize(("asked", "decay_steps"), [({}, 4), ({"decay_ratio": 0.5}, 10), ({"decay_ratio": 1.0}, 19)])
def test_the_share_of_the_decay_is_of_the_whole_run_and_leaves_the_warm_up(asked: Any, decay_steps: int) -> None:
    hyper = Hyperparameters(lr_scheduler="wsd", max_steps=20, **asked)
    assert make_decay_steps(hyper, 20, {}) == decay_steps


def test_a_share_of_decay_belongs_to_wsd() -> None:
    body = {"model": "m", "training_file": "t", "hyperparameters": {"decay_ratio": 0.1}}
    with pytest.raises(SpecError, match='belongs to lr_scheduler "wsd"'):
        parse_spec(body)


def test_the_warm_up_rises_evenly_and_wastes_no_step() -> None:
    plan = make_plan(warmup_steps=4, learning_rate=1.0)
    assert [learning_rate_at(step, plan) for step in (1, 2, 3, 4, 5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_falls_to_zero_at_the_end_of_the_run_and_not_before(schedule: str) -> None:
    plan = make_plan(lr_scheduler=schedule, warmup_steps=2)
    rates = [learning_rate_at(step, plan) for step in range(1, 21)]
    assert all(rate > 0 for rate in rates)
    assert learning_rate_at(21, plan) == pytest.approx(0, abs=1e-12)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_run_of_one_step_trains_at_the_full_rate() -> None:
    assert learning_rate_at(1, make_plan(steps=1, warmup_steps=1, learning_rate=0.5)) == 0.5
    assert learning_rate_at(1, make_plan(steps=1, learning_rate=0.5)) == 0.5


def test_a_run_that_is_all_warm_up_only_rises() -> None:
    plan = make_plan(steps=4, warmup_steps=4, learning_rate=1.0)
    assert [learning_rate_at(step, plan) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


def test_weight_decay_is_for_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    groups = build_optimizer(dict(model.named_parameters()), make_plan(weight_decay=0.1)).param_groups
    decayed = {id(weight) for group in groups if group["weight_decay"] for weight in group["params"]}
    assert decayed == {id(weight) for weight in model.parameters() if weight.ndim == 2}
    assert sum(len(group["params"]) for group in groups) == 4


def test_frozen_weights_are_not_in_the_optimizer() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    groups = build_optimizer(dict(model.named_parameters()), make_plan()).param_groups
    assert [len(group["params"]) for group in groups] == [1]


def test_a_step_is_that_of_adamw() -> None:
    model = nn.Linear(3, 1, bias=False)
    weight = model.weight.detach().clone()
    parallel = SingleDevice(model, make_plan(weight_decay=0.1, max_grad_norm=0.0))
    first, second = torch.zeros(1, 3), torch.zeros(1, 3)
    for step, rate in enumerate([0.1, 0.05], 1):
        parallel.backward((model.weight * torch.tensor([[1.0, -2.0, 3.0]]) * step).sum(), last=True)
        gradient = model.weight.grad.clone()
        parallel.step(rate)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = weight * (1 - rate * 0.1) - rate * update
        assert torch.allclose(model.weight, weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("limit", "clipped"), [(1.0, True), (10.0, False), (0.0, False)])
def test_the_norm_is_told_as_before_clipping_and_zero_turns_clipping_off(limit: float, clipped: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    parallel = SingleDevice(model, make_plan(max_grad_norm=limit))
    model[0].weight.grad = torch.tensor([[3.0, 0.0]])
    model[1].weight.grad = torch.tensor([[4.0]])
    assert float(parallel.clip()) == pytest.approx(5.0)
    after = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm()
    assert float(after) == pytest.approx(1.0 if clipped else 5.0, rel=1e-4)


def test_the_norm_of_many_numbers_is_that_of_fp64() -> None:
    """An embedding of 50,000 words has 30 million; clipping goes by it."""
    torch.manual_seed(0)
    many, few = torch.randn(3000, 2000) * 1e-3, torch.randn(7)
    exact = torch.cat([many.double().flatten(), few.double()]).square().sum().sqrt()
    assert float(find_norm([many, few])) == pytest.approx(float(exact), rel=1e-6)
    assert float(find_norm([])) == 0
