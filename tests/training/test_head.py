"""The loss in parts is the loss in one: values, gradients of what is below the head and of the head, and its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.tiny import make_model
from training.rank import head as head_module
from training.rank.head import find_head, list_losses, passing_through, sum_losses

TOKENS, WIDTH, VOCABULARY = 37, 16, 50


@pytest.fixture(params=[1, 7, 37, 100])
def rows_at_once(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(head_module.CHUNK_BYTES, "cpu", 4 * VOCABULARY * request.param)
    return int(request.param)


def make_case(*, bias: bool = False, trained: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(trained)
    return head, torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randint(0, VOCABULARY, (TOKENS,))


def grads_of(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *(weight for weight in head.parameters() if weight.requires_grad)]))


@pytest.mark.parametrize("trained", [False, True])
def test_sum_and_gradients_equal_the_plain_cross_entropy(trained: bool, rows_at_once: int) -> None:
    head, hidden, targets = make_case(bias=True, trained=trained)
    logits = head(hidden)
    want = functional.cross_entropy(logits, targets, reduction="sum")
    loss, right = sum_losses(hidden, targets, head)
    torch.testing.assert_close(loss, want)
    assert int(right) == int((logits.argmax(-1) == targets).sum())
    # The gradient that comes from above is not 1.
    for got, expected in zip(grads_of(loss / 7, hidden, head), grads_of(want / 7, hidden, head), strict=True):
        torch.testing.assert_close(got, expected)


def test_each_token_has_a_gradient_of_its_own(rows_at_once: int) -> None:
    head, hidden, targets = make_case(trained=False)
    weights = torch.randn(TOKENS)
    want = functional.cross_entropy(head(hidden), targets, reduction="none")
    losses = list_losses(hidden, targets, head)
    torch.testing.assert_close(losses, want)
    (got,) = grads_of((losses * weights).sum(), hidden, head)
    torch.testing.assert_close(got, grads_of((want * weights).sum(), hidden, head)[0])


def test_without_gradients_the_values_are_the_same(rows_at_once: int) -> None:
    head, hidden, targets = make_case(trained=True)
    with_gradients = sum_losses(hidden, targets, head)
    with torch.no_grad():
        loss, right = sum_losses(hidden, targets, head)
        assert not loss.requires_grad
        torch.testing.assert_close(list_losses(hidden, targets, head).sum(), loss)
    torch.testing.assert_close(loss, with_gradients[0].detach())
    assert right == with_gradients[1]


def test_a_loss_that_is_not_a_number_is_told() -> None:
    head, hidden, targets = make_case(trained=False)
    hidden.data[3, 2] = float("nan")
    assert torch.isnan(sum_losses(hidden, targets, head)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_gradients_are_those_of_the_plain_loss(dtype: torch.dtype, rows_at_once: int) -> None:
    for trained in (False, True):
        head, hidden, targets = make_case(trained=trained)
        with torch.autocast("cpu", dtype):
            want = functional.cross_entropy(head(hidden).float(), targets, reduction="sum")
            loss, _ = sum_losses(hidden, targets, head)
        torch.testing.assert_close(loss, want)
        for got, expected in zip(grads_of(loss, hidden, head), grads_of(want, hidden, head), strict=True):
            assert float((got - expected).norm() / expected.norm()) < 1e-2


def test_in_fp16_small_gradients_are_not_lost() -> None:
    """A token that the model is sure of has a gradient below what fp16 can tell from 0; the loss scale saves it, also
    where the gradient is computed before the scale is applied."""
    head, hidden, targets = make_case(trained=False)
    with torch.no_grad():
        targets[:] = head(hidden).argmax(-1)
        first, second = head(hidden).topk(2).values.unbind(1)
        hidden *= (16 / (first - second)).unsqueeze(1)
        kept = head(hidden).abs().amax(1) < 50
    exact = grads_of(functional.cross_entropy(head(hidden), targets, reduction="sum"), hidden, head)[0]
    with torch.autocast("cpu", torch.float16):
        loss, _ = sum_losses(hidden, targets, head)
    (got,) = grads_of(loss * 65536, hidden, head)
    error = ((got / 65536 - exact).norm(dim=1) / exact.norm(dim=1))[kept]
    assert len(error) > 5
    assert float(error.median()) < 0.05


def test_in_fp16_the_gradient_of_a_trained_head_stays_finite() -> None:
    """One token follows everywhere, after states as large as norms make them: its row of the gradient is the sum of all
    of these, which no loss scale could bring back once it is infinite."""
    torch.manual_seed(0)
    head = nn.Linear(16, 300, bias=False)
    hidden, targets = (torch.randn(600, 16) + 3).requires_grad_(), torch.full((600,), 7)
    exact = grads_of(functional.cross_entropy(head(hidden), targets, reduction="sum"), hidden, head)
    with torch.autocast("cpu", torch.float16):
        loss, _ = sum_losses(hidden, targets, head)
    for got, want in zip(grads_of(loss, hidden, head), exact, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_passes_through_a_model_is_what_its_head_takes(family: str, tied: bool) -> None:
    model = make_model(family, tied=tied).eval()
    head = find_head(model)
    assert head is model.lm_head
    ids = torch.arange(20, 60).unsqueeze(0)
    with torch.no_grad(), passing_through(head):
        hidden = model(input_ids=ids).logits
    with torch.no_grad():
        torch.testing.assert_close(head(hidden), model(input_ids=ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_model_that_changes_its_logits_afterwards_is_found(cap: float | None) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=cap,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    assert (find_head(model) is None) == (cap is not None)


def test_the_logits_of_a_pass_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = make_case(trained=False)
    monkeypatch.setitem(head_module.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 5)
    seen: list[int] = []
    hook = head.register_forward_hook(lambda _module, _inputs, output: seen.append(len(output)))
    sum_losses(hidden, targets, head)[0].backward()
    hook.remove()
    assert seen == [5] * 7 + [2]
