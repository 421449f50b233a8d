"""Numbers: what is computed in 16 bits, what is kept in 32, and how fp16 keeps its gradients in range."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import StopAtCheck, curve_of, events_of, last_event, make_job, same_weights, train_here, weights_of
from torch import nn

from tests.tiny import make_body, make_plan, save_model
from training.errors import SpecError
from training.facts import Counts, DataFacts, ModelFacts
from training.hardware import Format, Gpu, Hardware
from training.plan import Plan
from training.plan import make_plan as plan_of
from training.rank import loop
from training.rank.loss_scale import LossScale
from training.rank.parallel import SingleDevice
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from training.spec import parse_spec

MODEL = ModelFacts(
    family="llama", hidden_size=32, intermediate_size=64, layers=2, vocabulary=258, parameters=1000,
    trained_parameters=100, context_tokens=256,
)  # fmt: skip
DATA = DataFacts(
    counts=Counts(rows=8, trained_rows=8),
    examples=8,
    longest_tokens=64,
    longest_trained_tokens=8,
    tokens=512,
    trained_tokens=64,
)


def host_with(*capabilities: tuple[int, int]) -> Hardware:
    gpus = [Gpu(index=0, name="Some GPU", memory_bytes=2**34, compute_capability=found) for found in capabilities]
    return Hardware(gpus=tuple(gpus), cpu_cores=2, memory_bytes=2**34)


def plan_for(hardware: Hardware, precision: str) -> Plan:
    body = make_body(Path("base"), Path("rows.jsonl"), hyper={}, precision=precision)
    return plan_of(parse_spec(body), hardware, MODEL, DATA)


# What a device has


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        ((5, 2), ["fp32"]),
        ((7, 5), ["fp32", "fp16"]),
        ((8, 0), ["fp32", "fp16", "bf16"]),
        ((9, 0), ["fp32", "fp16", "bf16"]),
    ],
)
def test_a_format_that_the_gpu_lacks_is_refused_with_those_it_has(
    capability: tuple[int, int], formats: list[Format]
) -> None:
    for asked in ("fp32", "fp16", "bf16"):
        if asked in formats:
            assert plan_for(host_with(capability), asked).precision == asked
            continue
        with pytest.raises(SpecError, match=f"Some GPU does not compute in {asked}; it has {' and '.join(formats)}$"):
            plan_for(host_with(capability), asked)


def test_a_cpu_has_every_format() -> None:
    for asked in ("fp32", "fp16", "bf16"):
        plan = plan_for(host_with(), asked)
        assert plan.precision == asked
        with SingleDevice(nn.Linear(2, 2), plan).compute():
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == getattr(
                torch, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[asked]
            )


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "fp32"), ((8, 0), "bf16")])
def test_automatic_is_bf16_where_the_gpu_has_it(capability: tuple[int, int], chosen: str) -> None:
    plan = plan_for(host_with(capability), "auto")
    assert plan.precision == chosen
    assert "bf16" in plan.reasons["precision"]


# Masters


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_updates_that_vanish_in_16_bits_are_kept_by_fp32_masters(precision: str, tmp_path: Path) -> None:
    """The base is published in these 16 bits, so that to read it rounds nothing, which would look like movement."""
    rate = 1e-6
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    save_model(tmp_path / "base", dtype=dtype)
    body = make_job(tmp_path, hyper={"learning_rate": rate, "max_steps": 2, "n_epochs": "auto"}, precision=precision)
    body["adapter"] = {"type": "full"}
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    base = weights_of(tmp_path / "base")
    trained = weights_of(tmp_path / "run" / "checkpoints" / "step-00000002" / "model")
    inner = [name for name in base if "proj" in name]
    moved = sum(int((trained[name] != base[name]).sum()) for name in inner)
    assert moved / sum(base[name].numel() for name in inner) > 0.99

    pure = [nn.Parameter(base[name].to(dtype)) for name in inner]
    optimizer = torch.optim.AdamW(pure, lr=rate, weight_decay=0.0)
    before = [weight.detach().clone() for weight in pure]
    for _ in range(2):
        for weight in pure:
            weight.grad = torch.ones_like(weight)  # AdamW moves by the rate, whatever the gradient's size
        optimizer.step()
    moved = sum(int((weight != old).sum()) for weight, old in zip(pure, before, strict=True))
    assert moved / sum(weight.numel() for weight in pure) < 0.02


@pytest.mark.parametrize("adapter", [{"dropout": 0.1}, {"type": "full"}], ids=["lora", "full"])
def test_16_bits_train_to_nearly_the_losses_of_32(adapter: dict[str, Any], tmp_path: Path) -> None:
    curves = {}
    for precision in ("fp32", "bf16", "fp16"):
        body = make_job(tmp_path, adapter=adapter, precision=precision)
        assert train_here(tmp_path / precision, body) == EXIT_FINISHED
        steps = [event.data["train_loss"] for event in events_of(tmp_path / precision, "metrics")]
        curves[precision] = torch.tensor(steps)
    assert torch.allclose(curves["fp16"], curves["fp32"], rtol=5e-3)
    assert torch.allclose(curves["bf16"], curves["fp32"], rtol=5e-2)
    assert not torch.equal(curves["fp16"], curves["fp32"])


# The loss scale


def test_the_scale_moves_as_that_of_torch() -> None:
    scale, reference = LossScale(), torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    overflows = {3, 4, 2100, 2101, 6500}
    for step in range(1, 7000):
        weight.grad = torch.full((1,), math.inf if step in overflows else 1.0)
        reference.scale(torch.ones(1))
        reference.step(optimizer)
        reference.update()
        if step in overflows:
            scale.fall()
        else:
            scale.count_good_step()
        assert scale.factor == reference.get_scale(), step


def test_gradients_that_fp16_would_lose_arrive() -> None:
    """Those of the inner layer's output are about 1e-8, below the smallest number of fp16, 6e-8."""

    def gradient(precision: Format, factor: float = 65536.0) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        parallel = SingleDevice(model, make_plan(precision=precision, max_grad_norm=0.0))
        if parallel.loss_scale is not None:
            parallel.loss_scale.factor = factor
        with parallel.compute():
            out = model(torch.ones(1, 4))
        parallel.backward(out.float().sum() * 1e-8, last=True)
        parallel.clip()
        return model[0].weight.grad

    assert not gradient("fp16", factor=1.0).any()
    assert torch.allclose(gradient("fp16"), gradient("fp32"), rtol=5e-3, atol=0)


def test_clipping_sees_gradients_without_the_scale() -> None:
    model = nn.Linear(2, 1, bias=False)
    parallel = SingleDevice(model, make_plan(precision="fp16", max_grad_norm=1.0))
    parallel.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum(), last=True)
    assert float(parallel.clip()) == pytest.approx(5.0)
    assert torch.allclose(model.weight.grad, torch.tensor([[0.6, 0.8]]), rtol=1e-4)


class Overflowing:
    """The gradient norm of a run, planted as infinite at the n-th passes."""

    def __init__(self, *passes: int) -> None:
        self.passes, self.seen = passes, 0
        self.clip = SingleDevice.clip

    def __call__(self, parallel: SingleDevice) -> torch.Tensor:
        self.seen += 1
        if self.seen in self.passes:
            next(weight for weight in parallel.model.parameters() if weight.grad is not None).grad[0] = math.inf
        return self.clip(parallel)


def plant(monkeypatch: pytest.MonkeyPatch, *passes: int) -> None:
    planted = Overflowing(*passes)
    monkeypatch.setattr(SingleDevice, "clip", lambda parallel: planted(parallel))


def test_an_overflow_is_told_and_costs_no_step_no_row_and_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = make_job(tmp_path, adapter={"dropout": 0.3}, precision="fp16")
    assert train_here(tmp_path / "calm", body) == EXIT_FINISHED
    plant(monkeypatch, 3, 4)
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    warnings = events_of(tmp_path / "run", "warning")
    assert [(event.step, event.data["code"], event.data["loss_scale"]) for event in warnings] == [
        (2, "loss_scale_lowered", 32768.0),
        (2, "loss_scale_lowered", 16384.0),
    ]
    assert "step 3 overflowed fp16 at a loss scale of 65536: it was skipped" in warnings[0].data["message"]
    calm, curve = (curve_of(tmp_path / name, with_flops=False) for name in ("calm", "run"))
    assert [curve[step, "metrics"]["loss_scale"] for step in range(1, 7)] == [65536.0] * 2 + [16384.0] * 4
    for place, data in calm.items():
        got = {name: value for name, value in curve[place].items() if name != "loss_scale"}
        want = {name: value for name, value in data.items() if name != "loss_scale"}
        assert got == pytest.approx(want, rel=1e-3), place
        counts = ("num_tokens", "num_trained_tokens", "learning_rate")
        assert [got.get(name) for name in counts] == [want.get(name) for name in counts]


def test_a_gradient_that_no_scale_mends_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *range(2, 100))
    body = make_job(tmp_path, precision="fp16", hyper={"save_steps": 1})
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    failure = last_event(tmp_path / "run").data
    assert failure["code"] == "non_finite_loss"
    assert "the gradient of step 2 is not finite" in failure["message"]
    assert len(events_of(tmp_path / "run", "warning")) == 16
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_the_scale_outlives_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = make_job(tmp_path, adapter={"dropout": 0.3}, precision="fp16")
    plant(monkeypatch, 2)
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    plant(monkeypatch, 2)
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 22)) == EXIT_STOPPED
    stopped = last_event(tmp_path / "run").step
    assert 1 < stopped < 6
    state = torch.load(
        tmp_path / "run" / "checkpoints" / f"step-{stopped:08d}" / "state.pt", map_location="cpu", weights_only=True
    )
    assert state["optimizer"]["loss_scale"] == {"factor": 32768.0, "good_steps": stopped - 1}
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "adapter", tmp_path / "whole" / "adapter")


def test_a_stop_while_a_step_is_computed_again_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = make_job(tmp_path, adapter={"dropout": 0.3}, precision="fp16")
    plant(monkeypatch, 2)
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    told = loop.overflowed

    def overflowed(run: Any, *measured: float) -> bool:
        again = told(run, *measured)
        run.stop.reason = "asked by the test" if again else run.stop.reason
        return again

    plant(monkeypatch, 2)
    monkeypatch.setattr(loop, "overflowed", overflowed)
    assert train_here(tmp_path / "run", body) == EXIT_STOPPED
    assert last_event(tmp_path / "run").step == 1
    monkeypatch.undo()
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "adapter", tmp_path / "whole" / "adapter")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_no_scale_mends_leaves_the_scale_to_the_others(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 overflows at all 17 scales; gone back to step 2 it does so once more, and is left out then."""
    body = make_job(tmp_path, adapter={"dropout": 0.3}, precision="fp16", stability={"on_nan": policy})
    plant(monkeypatch, *range(3, 20 if policy == "skip" else 37))
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    told = [event.data for event in events_of(tmp_path / "run", "warning")]
    actions = [data["action"] for data in told if data["code"] == "non_finite_loss"]
    assert actions == (["skip"] if policy == "skip" else ["rollback", "skip"])
    metrics = events_of(tmp_path / "run", "metrics")
    assert [event.data["loss_scale"] for event in metrics if event.step > 3] == [65536.0] * 3
    saved = [tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "adapter" for step in (2, 4)]
    assert not same_weights(*saved)
    tokens = {event.step: event.data["num_trained_tokens"] for event in metrics}
    assert tokens[3] == tokens[2] < tokens[4]


def test_a_stop_between_the_tries_of_a_step_that_is_skipped_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = make_job(tmp_path, adapter={"dropout": 0.3}, precision="fp16", stability={"on_nan": "skip"})
    plant(monkeypatch, *range(2, 19))
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    plant(monkeypatch, *range(2, 19))
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 12)) == EXIT_STOPPED
    assert last_event(tmp_path / "run").step == 1
    assert 0 < len(events_of(tmp_path / "run", "warning")) < 16, "some tries are made, some are left"
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "adapter", tmp_path / "whole" / "adapter")
