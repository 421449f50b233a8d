"""How a model is cut into the stages of a pipeline. That the stages train what the whole model trains is shown on real
ranks (many/test_pipeline.py)."""

import copy

import pytest
import torch

from tests.tiny import FAMILIES, make_model, make_plan
from training.devices import count_stages, share_layers
from training.errors import SpecError
from training.rank.pipeline import try_whole
from training.rank.stages import find_homes, find_parts, keep_own, make_cuts, run_trunk, try_cuts

HALVES = make_cuts([1, 1])
IDS = torch.arange(5, 12).unsqueeze(0)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_the_ranks_keep_gives_one_after_the_other_what_the_whole_model_gives(family: str) -> None:
    """Bit for bit, with nothing of the other ranks left."""
    model = make_model(family, attention=None).eval()
    assert try_cuts(model, HALVES) is not None
    with torch.no_grad():
        want = run_trunk(find_parts(model), IDS, None)
        received = None
        for cut in HALVES:
            own = copy.deepcopy(model)
            keep_own(own, [cut], torch.device("cpu"))
            parts = find_parts(own)
            assert [any(weight.is_meta for weight in layer.parameters()) for layer in parts.layers] == [
                cut.is_last,
                cut.is_first,
            ]
            with cut.at_work(parts, received):
                received = run_trunk(parts, IDS, None)
    assert torch.equal(received, want)


def test_a_family_that_does_something_to_its_embeddings_is_refused_by_name() -> None:
    """GPT-2 adds those of the positions."""
    with pytest.raises(SpecError, match="models of the kind gpt2 do more than hand hidden states from layer to layer"):
        try_whole(make_model("gpt2"), make_plan(), HALVES)


def test_a_model_that_counts_its_layers_is_seen() -> None:
    """Equal shapes are not enough: here every stage would scale what it is given."""
    model = make_model()
    forward = model.model.forward

    def scaled(input_ids: torch.Tensor, **more: object) -> object:
        hook = model.model.embed_tokens.register_forward_hook(lambda _module, _inputs, given: given * 2)
        try:
            return forward(input_ids=input_ids, **more)
        finally:
            hook.remove()

    model.model.forward = scaled
    assert try_cuts(model, HALVES) is None


def test_every_weight_is_on_one_rank() -> None:
    model = make_model(tied=True)
    homes = find_homes(model, HALVES, 2)
    assert homes.keys() == model.state_dict().keys()
    assert homes["model.embed_tokens.weight"] == 0
    assert homes["model.layers.0.mlp.up_proj.weight"] == 0
    assert homes["model.layers.1.mlp.up_proj.weight"] == 1
    assert homes["model.norm.weight"] == homes["lm_head.weight"] == 1


@pytest.mark.parametrize(
    ("layers", "stages", "shares"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1])],
)
def test_layers_are_shared_evenly_and_the_last_stage_which_has_the_head_has_fewest(
    layers: int, stages: int, shares: list[int]
) -> None:
    assert share_layers(layers, stages) == shares


def test_interleaved_each_rank_has_two_stages() -> None:
    assert (count_stages(4, "1f1b"), count_stages(4, "interleaved"), count_stages(1, None)) == (4, 8, 1)
