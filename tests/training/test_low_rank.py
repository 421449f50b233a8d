"""Our LoRA layer computes what peft's own does, forward and backward, and leaves to it what is not plain LoRA."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from tests.tiny import make_model
from training.adapter import Adapter
from training.rank.lora import add_lora
from training.rank.low_rank import LowRankLinear, _LowRank
from training.rank.source import Source


class Net(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 40, bias=bias, dtype=dtype)
        self.second = nn.Linear(40, 16, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make_pair(*, bias: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any]:
    """The same adapted net, of peft's layers and of ours."""
    nets = []
    for ours in (False, True):
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["first", "second"], **more)
        if ours:
            config._register_custom_module({nn.Linear: LowRankLinear})
        net = get_peft_model(Net(bias, dtype), config)
        torch.manual_seed(1)
        for name, weight in net.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0, 0.3)
        nets.append(net)
    return nets[0], nets[1]


def run(net: Any, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = net(x)
    (out.float() * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    grads = {name: weight.grad for name, weight in net.named_parameters() if weight.requires_grad}
    return out.detach(), [x.grad, *(grads[name] for name in sorted(grads))]  # type: ignore[list-item]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each product of ours."""
    seen: list[int] = []
    forward = _LowRank.forward

    def counted(*arguments: Any) -> Any:
        seen.append(1)
        return forward(*arguments)

    monkeypatch.setattr(_LowRank, "forward", staticmethod(counted))
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_values_and_gradients_are_those_of_peft(bias: bool, rslora: bool, calls: list[int]) -> None:
    theirs, ours = make_pair(bias=bias, use_rslora=rslora)
    x = torch.randn(2, 5, 24)
    (want, want_grads), (got, got_grads) = run(theirs, x), run(ours, x)
    assert len(calls) == 2
    torch.testing.assert_close(got, want)
    for one, other in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_they_are_as_near_to_those_in_32_as_those_of_peft(dtype: torch.dtype, calls: list[int]) -> None:
    exact, _ = make_pair()
    theirs, ours = make_pair(dtype=dtype)
    assert all(weight.dtype == torch.float32 for weight in ours.parameters() if weight.requires_grad)
    x = torch.randn(7, 24)
    _, want = run(exact, x)
    (out, got), (_, peft) = run(ours, x, dtype), run(theirs, x, dtype)
    assert len(calls) == 2
    assert out.dtype == dtype
    for one, other, right in zip(got, peft, want, strict=True):
        assert one.dtype == other.dtype == torch.float32
        error, error_of_peft = ((found - right).norm() / right.norm() for found in (one, other))
        assert float(error) < max(1.5 * float(error_of_peft), 2e-3)


def test_what_is_not_plain_lora_is_left_to_peft(calls: list[int]) -> None:
    x = torch.randn(3, 24)
    for more in ({"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}):
        theirs, ours = make_pair(bias=True, **more)
        torch.manual_seed(3)
        want, want_grads = run(theirs, x)
        torch.manual_seed(3)
        got, got_grads = run(ours, x)
        assert torch.equal(got, want)
        assert all(torch.equal(one, other) for one, other in zip(got_grads, want_grads, strict=True))
    _, ours = make_pair()
    with ours.disable_adapter():
        ours(x)
    ours.merge_adapter()
    ours(x)
    assert calls == []


def test_of_several_adapters_the_active_one_counts(calls: list[int]) -> None:
    theirs, ours = make_pair()
    x = torch.randn(3, 24)
    for net in (theirs, ours):
        net.add_adapter("other", LoraConfig(r=2, lora_alpha=8, target_modules=["first", "second"]))
        torch.manual_seed(2)
        for name, weight in net.named_parameters():
            if ".other." in name:
                weight.data.normal_(0, 0.3)
    default = ours(x)
    for net in (theirs, ours):
        net.set_adapter("other")
    torch.testing.assert_close(ours(x), theirs(x))
    assert not torch.allclose(ours(x), default)
    assert len(calls) == 6


@pytest.mark.parametrize(("kind", "is_ours"), [("lora", True), ("qlora", False)])
def test_plain_layers_alone_are_ours(kind: str, is_ours: bool) -> None:
    model = add_lora(make_model(), Adapter(type=kind), Source(None, "base", "digest"), 0)  # type: ignore[arg-type]
    layers = [module for module in model.modules() if isinstance(module, PeftLinear)]
    assert len(layers) == 14
    assert all(isinstance(layer, LowRankLinear) is is_ours for layer in layers)
