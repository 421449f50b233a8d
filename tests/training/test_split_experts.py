"""Which mixtures of experts are split among ranks, what is said of the others, and how much a rank keeps then."""

from typing import Any

import pytest
import torch
from test_devices import EIGHT, refuse
from test_plan import SMOL, plan_for
from transformers import AutoModelForCausalLM

from tests.tiny import make_config
from training.adapter import Adapter
from training.errors import SpecError
from training.rank.adapters import count_trained_experts
from training.rank.experts import count_experts


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        (
            {"parallelism": {"expert": 3}},
            "parallelism.expert",
            "3 does not divide the 4 of them; make parallelism.data",
        ),
        ({"parallelism": {"expert": 8}}, "parallelism.expert", "8 does not divide the 4 of them"),
        (
            {"parallelism": {"expert": 2, "strategy": "fsdp"}},
            "parallelism.expert",
            '"fsdp" does not split experts; "ddp"',
        ),
        ({"parallelism": {"expert": 2, "strategy": "zero2"}}, "parallelism.expert", '"zero2" does not split experts'),
        ({"parallelism": {"expert": 2, "context": 2}}, "parallelism.expert", "leave context at 1, or this"),
        ({"adapter": {"type": "qlora"}}, "parallelism.expert", '"lora" is trained'),
        ({"hyper": {"optimizer": "adamw_8bit"}}, "parallelism.expert", 'take "adamw"'),
        ({"activation_offloading": True}, "activation_offloading", "leave one of them out"),
    ],
)
def test_experts_that_cannot_be_split_so_are_refused_with_what_can(
    more: dict[str, Any], param: str, words: str
) -> None:
    error = refuse(**{"resources": {"gpus": 4}, "parallelism": {"expert": 2}, **more})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("experts", "expert", "words"),
    [
        (0, 2, "llama has no experts that can be split among ranks; leave it at 1"),
        (6, 4, "4 does not divide the 6 experts of a layer; 2 and 3 and 6 do"),
        (6, 8, "8 does not divide the 6 experts of a layer; 2 and 3 and 6 do"),
    ],
)
def test_experts_are_split_among_ranks_that_divide_them(experts: int, expert: int, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        plan_for(
            hardware=EIGHT,
            model=SMOL.model_copy(update={"experts": experts}),
            resources={"gpus": 8},
            parallelism={"expert": expert},
        )
    assert refused.value.param == "parallelism.expert"


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_rank_keeps_its_share_of_the_experts_and_all_else(kind: str) -> None:
    """Of the weights, and of what is trained in 16 bytes each, a quarter of what belongs to experts."""
    full = kind == "full"
    whole = {"experts": 8, "parameters": 900, "expert_parameters": 800, "trained_parameters": 900 if full else 90}
    whole["trained_expert_parameters"] = 800 if full else 80
    plan = plan_for(
        hardware=EIGHT,
        model=SMOL.model_copy(update=whole),
        resources={"gpus": 8},
        adapter={"type": kind},
        parallelism={"expert": 4},
        precision="bf16",
    )
    states = plan.memory.weights_bytes + plan.memory.gradients_bytes + plan.memory.optimizer_bytes
    assert states == (16 * 300 if full else 2 * 300 + 16 * 30)
    assert (plan.ranks, plan.data, plan.expert, plan.activation_offloading) == (8, 8, 4, False)
    assert plan.parameters == 900


@pytest.mark.parametrize(
    ("family", "experts", "weights", "adapters"),
    [
        ("llama", 0, 0, 0),
        ("mixtral", 4, 2 * 4 * 3 * 32 * 64, 8 * 2 * 4 * ((128 + 32) + (32 + 64))),
        ("qwen3_moe", 4, 2 * 4 * 3 * 32 * 16, 8 * 2 * 4 * ((32 + 32) + (32 + 16))),
        ("gpt_oss", 4, 2 * 4 * (3 * 32 * 64 + 128 + 32), 8 * 2 * 4 * ((128 + 32) + (32 + 64))),
    ],
)
def test_experts_are_counted(family: str, experts: int, weights: int, adapters: int) -> None:
    """Two layers of four experts, each of three matrices, two of which lie in one; adapters of r 8."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(family))
    assert count_experts(model) == (experts, weights)
    assert count_trained_experts(model, Adapter(type="full")) == weights
    assert count_trained_experts(model, Adapter(r=8)) == adapters
    assert count_trained_experts(model, Adapter(target_modules=["q_proj"])) == 0
    assert count_trained_experts(model, Adapter(type="ia3")) == 0
