"""Optimizers with small states: against their formulas, resumed bit for bit, refused where the device lacks them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import StopAtCheck, curve_of, events_of, last_event, make_job, read_json, same_weights, train_here
from torch import nn

from tests.tiny import make_plan
from training.rank.optim import build_optimizer, set_rate
from training.rank.parallel import SingleDevice
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED

SMALL = ("adamw_8bit", "adafactor")


def descend(optimizer: str, steps: int = 30) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A matrix large enough for 8 bits, pulled towards another one."""
    torch.manual_seed(0)
    model, target = nn.Linear(128, 64, bias=False), torch.randn(64, 128)
    built = build_optimizer(dict(model.named_parameters()), make_plan(optimizer=optimizer, weight_decay=0.1))
    for step in range(steps):
        ((model.weight - target) ** 2).sum().backward()
        set_rate(built, 0.05 / (1 + step))
        built.step()
        built.zero_grad()
    return model.weight.detach(), built


def test_8_bits_go_nearly_where_32_go() -> None:
    (exact, _), (small, built) = descend("adamw"), descend("adamw_8bit")
    torch.manual_seed(0)
    start = nn.Linear(128, 64, bias=False).weight.detach()
    assert float((small - exact).norm() / (exact - start).norm()) < 0.05
    assert not torch.equal(small, exact)
    (state,) = built.state.values()
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)


def test_the_moments_cost_what_the_plan_says(tmp_path: Path) -> None:
    """Of a matrix two bytes a number and an fp32 scale for each 256 of either moment; with Adafactor its two sides."""
    _, built = descend("adamw_8bit", steps=1)
    (state,) = built.state.values()
    moments = sum(state[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2"))
    assert moments == 64 * 128 * 2 * (1 + 4 / 256)
    _, built = descend("adafactor", steps=1)
    (state,) = built.state.values()
    assert sum(state[name].nbytes for name in ("exp_avg_sq_row", "exp_avg_sq_col")) == 4 * (64 + 128)
    assert "exp_avg" not in state
    forecast = {}
    for optimizer in ("adamw", *SMALL):
        body = make_job(tmp_path, hyper={"optimizer": optimizer, "max_steps": 1, "n_epochs": "auto"})
        assert train_here(tmp_path / optimizer, body) == EXIT_FINISHED
        plan = read_json(tmp_path / optimizer / "plan.json")
        assert plan["optimizer"] == optimizer
        forecast[optimizer] = plan["memory"]["optimizer_bytes"] / plan["trained_parameters"]
    assert forecast == pytest.approx({"adamw": 8, "adamw_8bit": 2.03125, "adafactor": 0.5}, rel=1e-3)


def test_adafactor_is_that_of_its_paper_at_the_rate_of_the_plan() -> None:
    """Algorithm 4 with the rate given: a factored second moment, the update clipped to a mean square of 1."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    weight = model.weight.detach().double()
    parallel = SingleDevice(model, make_plan(optimizer="adafactor", max_grad_norm=0.0, weight_decay=0.1))
    rows, columns = torch.zeros(3, dtype=torch.double), torch.zeros(5, dtype=torch.double)
    for step, rate in enumerate([0.1, 0.05, 0.02], 1):
        gradient = torch.randn(3, 5)
        parallel.backward((model.weight * gradient).sum(), last=True)
        parallel.step(rate)
        decay = 1 - step**-0.8
        square = gradient.double() ** 2 + 1e-30
        rows = decay * rows + (1 - decay) * square.mean(1)
        columns = decay * columns + (1 - decay) * square.mean(0)
        update = gradient.double() / (rows[:, None] * columns[None] / rows.mean()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        weight = weight - rate * 0.1 * weight - rate * update
        assert torch.allclose(model.weight.double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adapter", [{"r": 64}, {"type": "full"}], ids=["lora", "full"])
@pytest.mark.parametrize("optimizer", SMALL)
def test_a_run_goes_on_bit_for_bit(optimizer: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    body = make_job(tmp_path, adapter=adapter, hyper={"optimizer": optimizer, "learning_rate": 1e-3})
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert 0 < last_event(tmp_path / "run").step < 6
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    result = "model" if adapter.get("type") == "full" else "adapter"
    assert same_weights(tmp_path / "run" / result, tmp_path / "whole" / result)
    evaluated = [event.data["eval_loss"] for event in events_of(tmp_path / "whole", "evaluated")]
    assert evaluated[-1] < evaluated[0]


def test_paged_moments_are_refused_on_a_cpu_with_what_it_has(tmp_path: Path) -> None:
    body = make_job(tmp_path, hyper={"optimizer": "paged_adamw_8bit"}, resources={"gpus": 0})
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    failure = last_event(tmp_path / "run").data
    assert failure["param"] == "method.supervised.hyperparameters.optimizer"
    assert 'it has "adamw", "adamw_8bit" and "adafactor"' in failure["message"]
