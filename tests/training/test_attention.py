"""Which attention runs where, and that packed rows reach it as rows."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import last_event, make_job, train_here
from torch import Tensor
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV32Config,
    DogeConfig,
    FalconConfig,
    LlamaConfig,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

from tests.tiny import make_config, make_model, make_plan, save_model
from training.adapter import Adapter
from training.errors import ModelError, SpecError
from training.facts import Counts, DataFacts, ModelFacts
from training.hardware import Gpu, Hardware, find_hardware
from training.plan import Plan
from training.plan import make_plan as plan_of
from training.rank.attention import BY_ROW, find_rows, use_rows
from training.rank.data import Example
from training.rank.loss import compute_logits, make_batch, score
from training.rank.model import build_model
from training.rank.source import find_source
from training.rundir import EXIT_FAILED
from training.spec import parse_spec

CPU = torch.device("cpu")
ROWS = [Example(n, ids, ids) for n, ids in enumerate(([5] * 9, [7, 8], [*range(20, 41)], [*range(60, 72)]))]
FACTS = ModelFacts(
    family="llama", hidden_size=64, intermediate_size=128, layers=2, vocabulary=258, parameters=10**6,
    trained_parameters=1000, context_tokens=256,
)  # fmt: skip
DATA = DataFacts(
    counts=Counts(rows=8, trained_rows=8), examples=8, longest_tokens=64, longest_trained_tokens=8, tokens=512,
    trained_tokens=64,
)  # fmt: skip


def plan_on(capability: tuple[int, int] | None, *, installed: bool = True, **asked: Any) -> Plan:
    gpus = [] if capability is None else [Gpu(index=0, name="Some", memory_bytes=2**34, compute_capability=capability)]
    hardware = Hardware(gpus=tuple(gpus), cpu_cores=2, memory_bytes=2**34, has_flash_attention=installed)
    return plan_of(parse_spec({"model": "m", "training_file": "f", **asked}), hardware, FACTS, DATA)


# What is planned


def test_flash_is_planned_where_it_was_asked_for_and_runs() -> None:
    assert plan_on((8, 0), attention="flash").attention == "flash"
    assert plan_on((9, 0), attention="flash", precision="fp16").attention == "flash"


@pytest.mark.parametrize(
    ("capability", "asked", "words"),
    [
        (None, {}, "on the CPU"),
        ((8, 0), {"resources": {"gpus": 0}}, "on the CPU"),
        ((7, 5), {}, "compute capability 8.0 or later, and this is a Some"),
        ((8, 0), {"precision": "fp32"}, "the precision is fp32"),
        ((8, 0), {"installed": False}, "flash-attn, which this host does not have"),
    ],
)
def test_flash_is_refused_with_the_reason(
    capability: tuple[int, int] | None, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=r'^attention: "flash"') as refused:
        plan_on(capability, attention="flash", **asked)
    assert words in refused.value.message
    assert refused.value.param == "attention"


def test_automatic_is_what_every_host_has() -> None:
    """A run that goes on on a host without the package comes to the same bits."""
    assert plan_on((8, 0)).attention == "sdpa"
    assert "every host has it" in plan_on((8, 0)).reasons["attention"]


@pytest.mark.parametrize(("name", "found"), [("flash_attn-2.8.3", True), ("flash_attn_4-4.0.0", False), (None, False)])
def test_the_package_is_found_by_what_is_installed(
    name: str | None, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PackageNotFoundError):
        version("flash-attn")
    if name is not None:
        package, number = name.rsplit("-", 1)
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {number}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_hardware().has_flash_attention is found
    assert "flash_attn" not in sys.modules


def test_a_run_on_this_host_that_asks_for_flash_is_refused(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, attention="flash")) == EXIT_FAILED
    assert last_event(tmp_path / "run").data["param"] == "attention"


def test_the_loader_is_asked_for_transformers_name_of_it(tmp_path: Path) -> None:
    """Which says here that the package is not there."""
    source = find_source(str(save_model(tmp_path / "base")), weights=True)
    with pytest.raises(ModelError, match="FlashAttention2"):
        build_model(source, make_plan(attention="flash"), Adapter())


# What reaches it of packed rows


def test_transformers_finds_the_rows_of_our_batches() -> None:
    batch = make_batch(ROWS, CPU)
    assert _is_packed_sequence(batch.position_ids, batch_size=1)
    (starts, of_keys), (longest, _) = prepare_fa_kwargs_from_position_ids(batch.position_ids)
    # The last token of a row predicts nothing and is left out.
    assert starts.tolist() == of_keys.tolist() == [0, 8, 9, 29, 40]
    assert (longest, starts.dtype) == (20, torch.int32)


def test_a_row_alone_is_no_packed_sequence() -> None:
    batch = make_batch(ROWS[:1], CPU)
    assert batch.position_ids is None
    assert not _is_packed_sequence(torch.arange(8)[None], batch_size=1)


def by_rows(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
    """Attention as flash-attn's function for rows of different lengths does it: row by row, told by the positions."""
    assert mask is None
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    (starts, _), _ = prepare_fa_kwargs_from_position_ids(given["position_ids"])
    parts = [
        functional.scaled_dot_product_attention(
            *(states[:, :, begin:end] for states in (query, key, value)), is_causal=True, scale=given.get("scaling")
        )
        for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_attention_of_rows_told_by_their_positions_gives_the_logits_of_masked_attention(family: str) -> None:
    AttentionInterface.register("by_rows", by_rows)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family), attn_implementation="by_rows").eval()
    batch = make_batch(ROWS, CPU)
    with torch.no_grad():
        torch.testing.assert_close(compute_logits(model, batch), compute_logits(make_model(family).eval(), batch))


# What PyTorch's own makes of it


def mask_of(rows: list[Example]) -> Tensor | None:
    batch = make_batch(rows, CPU)
    tokens = batch.input_ids.shape[1]
    found: Tensor | None = create_causal_mask(
        config=make_model().config,
        inputs_embeds=torch.zeros(1, tokens, 32),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(tokens)[None] if batch.position_ids is None else batch.position_ids,
    )
    return found


def test_a_row_alone_has_no_mask_and_packed_rows_have_one_of_blocks() -> None:
    """Without a mask PyTorch can take its flash kernel, with one it takes the memory-efficient one."""
    assert mask_of(ROWS[:1]) is None
    mask = mask_of(ROWS)
    blocks = [torch.ones(size, size, dtype=torch.bool).tril() for size in (8, 1, 20, 11)]
    assert mask is not None
    assert torch.equal(mask[0, 0], torch.block_diag(*blocks).bool())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral", "gemma3", "phi3", "qwen3", "mixtral"])
def test_row_by_row_is_masked_attention(family: str) -> None:
    """Values and gradients; the windows of Mistral and Gemma 3 are shorter than the third row."""
    results = []
    for attention in ("sdpa", BY_ROW):
        model = make_model(family, attention=attention)
        loss, _ = score(model, make_batch(ROWS, CPU))
        loss.backward()
        results.append((loss.detach(), [weight.grad for weight in model.parameters()]))
    (want, want_grads), (got, got_grads) = results
    torch.testing.assert_close(got, want)
    for one, other in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


SHAPE: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (LlamaConfig(**SHAPE, intermediate_size=64), BY_ROW),
        (DogeConfig(**SHAPE, intermediate_size=64, keep_window_size=4, initializer_range=0.2), BY_ROW),
        (FalconConfig(**SHAPE, initializer_range=0.2), "sdpa"),
        (FalconConfig(**SHAPE, initializer_range=0.2, alibi=True), "sdpa"),
    ],
    ids=["llama", "doge", "falcon", "falcon with alibi"],
)
def test_families_that_change_the_mask_are_left_their_way(config: Any, attention: str) -> None:
    """Doge hides more of the mask that it is given, Falcon makes a bias of it."""
    results = []
    for by_row in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        if by_row:
            use_rows(model)
            assert model.config._attn_implementation == attention
        results.append(compute_logits(model, make_batch(ROWS, CPU)))
    torch.testing.assert_close(results[1], results[0])


def test_a_family_that_asks_for_the_attention_by_its_name_keeps_it() -> None:
    """DeepSeek-V3.2 adds to the mask what its index leaves out only where the name is that of PyTorch's own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            DeepseekV32Config(**SHAPE, num_key_value_heads=4), attn_implementation="sdpa"
        )
    use_rows(model)
    assert model.config._attn_implementation == "sdpa"


def test_the_rows_are_read_from_the_mask() -> None:
    mask = mask_of(ROWS)
    assert mask is not None
    rows = find_rows(mask)
    assert rows is not None
    assert rows.tolist() == [8, 1, 20, 11]
    ones = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    causal = ones.tril()
    assert find_rows(causal).tolist() == [6]  # type: ignore[union-attr]
    window, leak = causal.triu(-2), torch.block_diag(ones[0, 0, :3, :3].tril(), ones[0, 0, :3, :3].tril()).bool()
    leak[5, 1] = True
    for other in (window, ones, leak[None, None], causal.float(), causal[:, :, 2:], causal.expand(2, 1, 6, 6)):
        assert find_rows(other) is None


@pytest.mark.parametrize(("attention", "layers"), [("sdpa", 2), (BY_ROW, 0)])
def test_no_layer_keeps_a_mask(attention: str, layers: int) -> None:
    """With PyTorch's own each keeps one, in the compute type."""
    tokens = sum(len(row.input_ids) - 1 for row in ROWS)
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) == (1, 1, tokens, tokens):
            seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(note(t)) or t, lambda t: t):
        compute_logits(make_model(attention=attention), make_batch(ROWS, CPU))
    assert sum(seen.values()) == layers * 4 * tokens**2


def test_the_forecast_counts_what_the_lengths_are_made_of() -> None:
    hyper = {"micro_batch_size": 8, "batch_size": 8}
    forecast = {
        attention: plan_on(
            (8, 0), attention=attention, precision="bf16", hyperparameters=hyper
        ).memory.activations_bytes
        for attention in ("sdpa", "flash")
    }
    assert forecast["sdpa"] - forecast["flash"] == 8 * (8 * 64) ** 2
