"""Activations wait elsewhere for the backward pass: the same gradients, weights stay, and what was moved is let go."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.tiny import make_plan, save_model
from training.adapter import Adapter
from training.rank import offloading
from training.rank.data import Example
from training.rank.loss import make_batch, score
from training.rank.model import build_model, get_base
from training.rank.offloading import Moved, Offloading
from training.rank.source import find_source

CPU = torch.device("cpu")
ROWS = [Example(n, ids, ids) for n, ids in enumerate((list(range(20, 60)), list(range(70, 93))))]
LAYERS, WIDTH, TOKENS = 2, 32, 39
"""Of the tiny model, and of the first row: its last token predicts nothing."""

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora with dropout": ({"dropout": 0.2}, {}),
    "lora in bf16": ({}, {"precision": "bf16"}),
    "all weights": ({"type": "full"}, {}),
    "all weights in bf16": ({"type": "full"}, {"precision": "bf16"}),
    "4 bits": ({"type": "qlora"}, {}),
    "prompt": ({"type": "prompt"}, {}),
    "checkpointed": ({"dropout": 0.2}, {"gradient_checkpointing": True}),
    "eager": ({}, {"attention": "eager"}),
}


@pytest.fixture(params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", request.param)


def build(base: Path, adapter: dict[str, Any], plan: dict[str, Any]) -> nn.Module:
    source = find_source(str(base), weights=True)
    model = build_model(source, make_plan(**plan), Adapter.model_validate(adapter))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    return model


def gradients_of(model: nn.Module, rows: list[Example], plan: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=plan.get("precision") == "bf16"):
        loss, _ = score(model, make_batch(rows, CPU))
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(bool(gradient.any()) for gradient in found.values())
    return found


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Detached tensors that went to the host, their storages kept."""
    seen: list[Tensor] = []
    move = offloading._move

    def note(tensor: Tensor) -> Moved:
        seen.append(tensor)
        return move(tensor)

    monkeypatch.setattr(offloading, "_move", note)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_gradients_are_the_same_bits_and_no_weight_is_moved(
    kind: str, rows: int, base: Path, moved: list[Tensor]
) -> None:
    adapter, plan = KINDS[kind]
    rows = 1 if kind == "prompt" else rows
    want = gradients_of(build(base, adapter, plan), ROWS[:rows], plan)
    model = build(base, adapter, plan)
    Offloading(model, get_base(model).base_model, min_bytes=0)
    got = gradients_of(model, ROWS[:rows], plan)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)

    assert moved
    weights = list(model.parameters())
    assert not {t.untyped_storage().data_ptr() for t in moved} & {w.untyped_storage().data_ptr() for w in weights}
    trained = {tuple(weight.shape) for weight in weights if weight.requires_grad}
    assert not trained & {tuple(tensor.shape) for tensor in moved}, "copies of weights in 16 bits stay too"


def test_with_checkpointing_the_inputs_of_the_layers_are_moved_and_nothing_else(
    tmp_path: Path, moved: list[Tensor]
) -> None:
    adapter, plan = KINDS["checkpointed"]
    model = build(save_model(tmp_path / "base"), adapter, plan)
    Offloading(model, get_base(model).base_model, min_bytes=TOKENS * WIDTH * 4)
    gradients_of(model, ROWS[:1], plan)
    # The last normalisation is not checkpointed; it saves its input, cast to fp32 or not, and what it makes of it.
    inputs = [tensor for tensor in moved if tensor.shape == (1, TOKENS, WIDTH)]
    assert len(inputs) == len(moved)
    assert LAYERS <= len(inputs) <= LAYERS + 3
    assert len({tensor.data_ptr() for tensor in inputs}) == len(inputs), "none twice"


def test_what_was_moved_is_let_go_until_the_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of what the layers save lives nowhere but on the host between the two passes."""
    seen: list[tuple[StorageWeakRef, int]] = []
    move = offloading._move

    def note(tensor: Tensor) -> Moved:
        seen.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        return move(tensor)

    def alive_share() -> float:
        loss, _ = score(model, make_batch(ROWS[:1], CPU))
        share = sum(size for storage, size in seen if not storage.expired()) / sum(size for _, size in seen)
        loss.backward()
        return share

    model = build(save_model(tmp_path / "base"), {}, {})
    Offloading(model, get_base(model).base_model, min_bytes=1000)
    monkeypatch.setattr(offloading, "_move", note)
    assert alive_share() < 0.05
    # The check can fail: kept where they are, they all live on.
    seen.clear()
    monkeypatch.setattr(offloading, "_move", lambda tensor: (note(tensor), tensor)[1])
    assert alive_share() == 1.0


def test_small_tensors_stay(tmp_path: Path, moved: list[Tensor]) -> None:
    model = build(save_model(tmp_path / "base"), {}, {})
    offload = Offloading(model, get_base(model).base_model)
    gradients_of(model, ROWS[:1], {})
    assert (moved, offload.moved) == ([], 0), "the tiny model has none of a MiB"


def test_an_evaluation_moves_nothing(tmp_path: Path) -> None:
    model = build(save_model(tmp_path / "base"), {}, {})
    offload = Offloading(model, get_base(model).base_model, min_bytes=0)
    with torch.no_grad():
        score(model, make_batch(ROWS[:1], CPU))
    assert offload.moved == 0


def test_weights_that_lie_elsewhere_since_stay_too(tmp_path: Path, moved: list[Tensor]) -> None:
    model = build(save_model(tmp_path / "base"), {"type": "full"}, {})
    Offloading(model, get_base(model).base_model, min_bytes=0)
    for weight in model.parameters():
        weight.data = weight.data.clone()
    gradients_of(model, ROWS[:1], {})
    places = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert not places & {tensor.untyped_storage().data_ptr() for tensor in moved}


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[:, 1:5], lambda x: x[::2].t()])
def test_a_tensor_comes_back_as_it_lay(make: Any) -> None:
    tensor = make(torch.randn(8, 6))
    back = offloading._unpack(offloading._move(tensor))
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert back.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("asked", [True, False])
def test_the_plan_says_whether_a_model_offloads(asked: bool, tmp_path: Path, moved: list[Tensor]) -> None:
    plan = {"activation_offloading": asked, "attention": "eager"}
    # Four heads' attention matrix of 299 tokens is more than a MiB.
    gradients_of(build(save_model(tmp_path / "base"), {}, plan), [Example(0, [5] * 300, [5] * 300)], {})
    assert bool(moved) is asked
