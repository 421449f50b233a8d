"""The loss of a window is that of a plain padded batch, however the window is cut; rows never see each other."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tests.tiny import make_config, make_model
from training.rank.apart import find_trial_passes, keeps_rows_apart
from training.rank.data import Example
from training.rank.loss import Batch, compute_logits, count_trained, make_batch, score
from training.rank.order import cut
from training.rank.passes import PassLimit

CPU = torch.device("cpu")
FAMILIES = ["llama", "gpt2", "qwen2"]


def make_example(length: int, labelled: range, seed: int) -> Example:
    ids = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example(seed, ids, [token if place in labelled else -100 for place, token in enumerate(ids)])


ROWS = [
    make_example(12, range(5, 12), 1),
    make_example(7, range(6, 7), 2),
    make_example(20, range(0, 20), 3),
    make_example(15, range(3, 9), 4),
    make_example(9, range(8, 9), 5),
    make_example(2, range(0, 2), 6),
]


def train_pass(model: Any, rows: list[Example], size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a window in passes of `size` rows."""
    model.zero_grad()
    total = 0.0
    for part in cut(rows, size):
        loss, _ = score(model, make_batch(part, CPU))
        (loss / count_trained(rows)).backward()
        total += float(loss.detach()) / count_trained(rows)
    return total, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def padded_reference(model: Any, rows: list[Example]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same as one plain padded batch: hand-shifted labels, all logits, an attention mask."""
    model.zero_grad()
    width = max(len(row.input_ids) for row in rows)

    def pad(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])

    ids = pad([row.input_ids for row in rows], 257)
    labels = pad([row.labels for row in rows], -100)
    mask = pad([[1] * len(row.input_ids) for row in rows], 0)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    return float(loss.detach()), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        assert float((got[name] - grad).abs().max()) <= 1e-6 * max(1.0, largest), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_loss_and_gradient_are_those_of_a_padded_batch_however_the_window_is_cut(family: str, size: int) -> None:
    model = make_model(family)
    want_loss, want_grads = padded_reference(model, ROWS)
    loss, grads = train_pass(model, ROWS, size)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_close(grads, want_grads)


def test_a_mean_of_means_would_be_seen_by_the_test_above() -> None:
    model = make_model()
    want, _ = padded_reference(model, ROWS)
    means = [score(model, make_batch([row], CPU))[0].item() / count_trained([row]) for row in ROWS]
    assert abs(sum(means) / len(means) - want) > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_change_when_the_row_before_it_does(family: str, attention: str) -> None:
    model = make_model(family, attention=attention).eval()
    before, other, row = make_example(9, range(9), 1), make_example(9, range(9), 2), make_example(8, range(8), 3)
    with torch.no_grad():
        beside = [compute_logits(model, make_batch([first, row], CPU))[-7:] for first in (before, other)]
        alone = compute_logits(model, make_batch([row], CPU))
    assert torch.equal(*beside)
    assert torch.allclose(beside[0], alone, atol=1e-5)


def test_without_restarting_positions_rows_would_leak() -> None:
    model = make_model().eval()
    firsts, row = [make_example(9, range(9), seed) for seed in (1, 2)], make_example(8, range(8), 3)
    batches = [make_batch([first, row], CPU) for first in firsts]
    with torch.no_grad():
        one, other = (compute_logits(model, Batch(b.input_ids, None, b.kept, b.targets))[-7:] for b in batches)
    assert not torch.allclose(one, other, atol=1e-3)


def test_the_output_head_runs_only_where_a_label_is() -> None:
    model = make_model()
    score(model, make_batch(ROWS, CPU))
    seen: list[int] = []
    hook = model.lm_head.register_forward_hook(
        lambda _module, inputs, output: seen.append(len(output) * (output.shape != inputs[0].shape))
    )
    score(model, make_batch(ROWS, CPU))
    hook.remove()
    assert sum(seen) == count_trained(ROWS)  # once it lets through what it is given


def test_nothing_after_the_last_label_is_computed() -> None:
    batch = make_batch([make_example(30, range(4, 10), 1)], CPU)
    assert batch.input_ids.shape == (1, 9)
    assert batch.position_ids is None


def test_the_first_token_of_a_row_is_not_counted_and_label_zero_is() -> None:
    row = Example(1, [5, 0, 7], [5, 0, -100])
    assert count_trained([row]) == 1
    assert make_batch([row], CPU).targets.tolist() == [0]


def test_a_model_whose_forward_keeps_no_logits_back_gives_the_same_loss() -> None:
    class Plain(LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, use_cache: Any = None) -> Any:
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model = make_model()
    plain = Plain(make_config())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(score(plain, make_batch(ROWS, CPU))[0], score(model, make_batch(ROWS, CPU))[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_attention_take_several_rows_in_one_pass(family: str) -> None:
    model = make_model(family).train()
    assert keeps_rows_apart(model, CPU)
    assert model.training


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_do_those_with_windows_and_experts(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, attention=None).to(dtype)
    assert keeps_rows_apart(model, CPU, [ROWS])


def test_models_whose_mask_is_made_without_positions_do_not() -> None:
    model = make_model("gpt_oss", attention="eager")
    assert not keeps_rows_apart(model, CPU)
    with torch.no_grad():
        beside = compute_logits(model, make_batch(ROWS[:2], CPU))[-1]
        alone = compute_logits(model, make_batch([ROWS[1]], CPU))[-1]
    assert not torch.allclose(beside, alone, atol=1e-2)


def test_a_long_row_may_change_the_positions_of_a_short_one() -> None:
    """Phi-3 with LongRoPE has other frequencies for rows that are longer than its first context."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 16}
    config = make_config("phi3")
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 16.0, **factors}
    config = type(config)(**{**config.to_dict(), "rope_parameters": rope, "original_max_position_embeddings": 16})
    model = AutoModelForCausalLM.from_config(config)
    long, short = make_example(20, range(20), 3), make_example(12, range(12), 1)
    assert keeps_rows_apart(model, CPU, [[short, short], [long, long]])
    assert not keeps_rows_apart(model, CPU, [[long, short]])


def test_the_trial_passes_are_the_fullest_and_one_of_the_longest_and_the_shortest() -> None:
    lengths = [[len(row.input_ids) for row in rows] for rows in find_trial_passes(ROWS, PassLimit(3))]
    assert lengths == [[20, 15, 12], [20, 2]]
    lengths = [[len(row.input_ids) for row in rows] for rows in find_trial_passes(ROWS, PassLimit(6, 30))]
    assert lengths == [[15, 12], [20, 2]]
    assert [[row.line for row in rows] for rows in find_trial_passes(ROWS[:1], PassLimit(4))] == [[1]]


def test_models_that_carry_a_state_along_do_not() -> None:
    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert not keeps_rows_apart(MambaForCausalLM(config), CPU)


def test_models_that_ignore_positions_do_not() -> None:
    class OwnPositions(LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, **others: Any) -> Any:
            return super().forward(input_ids=input_ids, **others)

    assert not keeps_rows_apart(OwnPositions(make_config()), CPU)


def test_accuracy_counts_the_most_likely_tokens() -> None:
    model = make_model()
    batch = make_batch(ROWS, CPU)
    _, right = score(model, batch)
    logits = compute_logits(model, batch)
    assert int(right) == sum(int(line.argmax()) == int(want) for line, want in zip(logits, batch.targets, strict=True))
