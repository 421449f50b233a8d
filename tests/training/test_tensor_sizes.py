"""Matrices split among ranks: what is refused, and what a rank needs of memory."""

from typing import Any

import pytest
from test_devices import EIGHT, refuse
from test_plan import SMOL, plan_for

from training.errors import SpecError


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"adapter": {"type": "qlora"}}, "parallelism.tensor", 'by strategy "ddp", with tensor left out'),
        ({"adapter": {"type": "ia3"}}, "parallelism.tensor", 'by strategy "ddp", with tensor left out'),
        ({"adapter": {"type": "prefix"}}, "parallelism.tensor", 'by strategy "ddp", with tensor left out'),
        ({"adapter": {"use_dora": True}}, "parallelism.tensor", 'by strategy "fsdp", with tensor left out'),
        ({"hyper": {"optimizer": "adafactor"}}, "parallelism.tensor", 'take "adamw", or'),
        ({"activation_offloading": True}, "activation_offloading", "leave it out"),
        (
            {"resources": {"gpus": 4}, "parallelism": {"tensor": 2, "strategy": "zero1"}, "deepspeed": {}},
            "deepspeed",
            "leave it out",
        ),
    ],
)
def test_what_split_matrices_do_not_take_is_refused_with_what_works(
    more: dict[str, Any], param: str, words: str
) -> None:
    error = refuse(**{"resources": {"gpus": 2}, "parallelism": {"tensor": 2}, **more})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tensor_units": 1}, 'no plan for how to split the layers of llama; leave it out, strategy "fsdp"'),
        ({"tensor_units": 6}, 'not divisible by 4; 2, 3, 6 would do, and strategy "fsdp"'),
        ({"tensor_units": 6, "stacked_parameters": 8}, 'experts in stacks are not split; "ddp" and "fsdp" train them'),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused_with_the_sizes_that_can(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=r"parallelism\.tensor") as refused:
        plan_for(
            hardware=EIGHT,
            model=SMOL.model_copy(update=facts),
            resources={"gpus": 4},
            parallelism={"tensor": 4},
        )
    assert words in refused.value.message


def test_the_forecast_of_split_matrices_is_that_of_a_part() -> None:
    """Full fine-tuning: 16 bytes of each weight that a rank has, and those of norms whole."""
    model = SMOL.model_copy(
        update={"tensor_units": 4, "parameters": 1000, "trained_parameters": 1000, "whole_parameters": 200}
    )
    plan = plan_for(
        hardware=EIGHT,
        model=model,
        resources={"gpus": 4},
        parallelism={"tensor": 4},
        adapter={"type": "full"},
    )
    memory = plan.memory
    assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (1600, 1600, 3200)
