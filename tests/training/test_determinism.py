"""On a GPU only kernels are taken that give the same bits each time; the rule itself is torch's and holds here too."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from training.rank.determinism import require_same_bits


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_model_whose_kernels_are_all_repeatable_is_held_to_them() -> None:
    model = nn.Linear(4, 4)
    assert require_same_bits(model, lambda: model(torch.randn(2, 4)).sum().backward()) is None
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "attention heeds no mere warning"


def test_one_with_a_kernel_that_is_not_may_run_and_is_named() -> None:
    class Unpooling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            pooled, places = nn.functional.max_pool1d(super().forward(input), 2, return_indices=True)
            return nn.functional.max_unpool1d(pooled, places, 2)

    model = Unpooling(4, 4)
    lacking = require_same_bits(model, lambda: model(torch.randn(1, 2, 4)).sum().backward())
    assert lacking is not None
    assert "max_unpool" in lacking
    assert lacking.endswith("does not have a deterministic implementation")
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    model(torch.randn(1, 2, 4))


def test_the_trial_leaves_no_gradient_and_no_random_number_behind() -> None:
    model = nn.Linear(4, 4)
    before = torch.get_rng_state()
    require_same_bits(model, lambda: nn.functional.dropout(model(torch.randn(2, 4))).sum().backward())
    assert torch.equal(torch.get_rng_state(), before)
    assert model.weight.grad is None


def test_another_error_of_the_trial_is_not_hidden() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        require_same_bits(model, lambda: model(torch.randn(2, 5)))
