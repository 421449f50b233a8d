"""FLOPs by formula against PyTorch's own count of what real passes compute, and against published tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import StopAtCheck, events_of, last_event, make_job, read_json, train_here
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.tiny import make_model
from training.adapter import Adapter
from training.facts import Matmuls
from training.flops import count_forward, count_training, make_load, virtual_places
from training.hardware import Gpu
from training.peaks import find_peak
from training.rank import loop
from training.rank.adapters import add_adapter
from training.rank.head import find_head
from training.rank.loss import make_batch, score
from training.rank.matmuls import count_matmuls
from training.rank.model import _checkpoint_activations, forward_names, get_base, make_facts
from training.rank.sieve import Example
from training.rank.source import Source
from training.rundir import EXIT_FINISHED, EXIT_STOPPED

NOWHERE = Source(Path(), "base", "digest")
IDS = list(range(3, 27))
ROW = Example(line=1, input_ids=IDS, labels=[-100] * 10 + IDS[10:20] + [-100] * 4)
"""Its last trained token is at place 19: 19 tokens are computed, 10 of them carry loss."""
CHINCHILLA = [
    (400e6, 8.0e9, 1.92e19), (1e9, 20.2e9, 1.21e20), (10e9, 205.1e9, 1.23e22), (67e9, 1.5e12, 5.76e23),
    (175e9, 3.7e12, 3.85e24), (280e9, 5.9e12, 9.90e24), (1e12, 21.2e12, 1.27e26),
]  # fmt: skip
"""Hoffmann et al. 2022, table 3: parameters, tokens, FLOPs."""
SMOL = Matmuls(body=106_168_320, head=28_311_552, attention=30 * 576)
"""SmolLM2-135M: 30 layers of 9 heads of 64 numbers."""


def count(compute: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops()


def matmuls_of(model: Any, adapter: Adapter) -> Matmuls:
    return count_matmuls(model, adapter, forward_names(type(model)))


def ready(model: Any, adapter: Adapter, *, checkpointing: bool) -> Any:
    if adapter.type != "full":
        model = add_adapter(model, adapter, NOWHERE, 0)
    if checkpointing:
        _checkpoint_activations(model)
    return model.train()


def compare(family: str, checkpointing: bool, **adapter: Any) -> tuple[float, float]:
    """Our count over PyTorch's, of the forward pass and of all. Eager attention: the counter does not know the fused
    one of CPUs."""
    asked = Adapter(**adapter)
    model = make_model(family, attention="eager")
    matmuls = matmuls_of(model, asked)
    model = ready(model, asked, checkpointing=checkpointing)
    prefix, prompt = virtual_places(asked)
    load = make_load([19], 10, "eager", prefix=prefix, prompt=prompt)
    batch = make_batch([ROW], torch.device("cpu"))
    find_head(get_base(model))
    with torch.no_grad():
        forward = count(lambda: score(model, batch))
    both = count(lambda: score(model, batch)[0].backward())
    trained = count_training(matmuls, load, checkpointing=checkpointing)
    return count_forward(matmuls, load).done / forward, trained.done / both


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "full"},
        {"r": 4},
        {"r": 4, "use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": {"regex": r".*(down_proj|mlp\.c_proj)"}},
        {"target_modules": {"regex": r".*(gate_proj|up_proj|c_fc)"}},
        {"type": "prompt", "num_virtual_tokens": 5},
    ],
    ids=str,
)
def test_a_pass_and_its_gradients_take_what_pytorch_counts(
    family: str, checkpointing: bool, adapter: dict[str, Any]
) -> None:
    assert compare(family, checkpointing, **adapter) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj"]}),
        ("llama", {"type": "ia3"}),
        ("llama", {"type": "prefix", "num_virtual_tokens": 5}),
        ("gpt2", {"type": "prefix", "num_virtual_tokens": 5}),
    ],
)
def test_what_the_first_attention_saves_is_left_out_but_for_one_product(family: str, adapter: dict[str, Any]) -> None:
    """Its queries or keys depend on nothing trained and have no gradient: an eighth of the attention of this model,
    nothing of one with thirty layers."""
    forward, all_of_it = compare(family, False, **adapter)
    assert forward == 1.0
    assert 1.0 < all_of_it < 1.016


@pytest.mark.parametrize("adapter", [{"type": "full"}, {"r": 4}], ids=str)
def test_of_experts_those_count_that_a_token_goes_through(adapter: dict[str, Any]) -> None:
    asked = Adapter(**adapter)
    config = MixtralConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    matmuls = matmuls_of(model, asked)
    model = ready(model, asked, checkpointing=False)
    batch = make_batch([ROW], torch.device("cpu"))
    find_head(get_base(model))
    counted = count(lambda: score(model, batch)[0].backward())
    ours = count_training(matmuls, make_load([19], 10, "eager"), checkpointing=False).done
    assert ours == pytest.approx(counted, rel=1e-9)


@pytest.mark.parametrize("method", ["supervised", "dpo", "kto", "pretrain"])
@pytest.mark.parametrize(("micro", "checkpointing"), [(1, False), (2, True)])
def test_the_flops_of_a_run_are_those_that_pytorch_counts(
    method: str, micro: int, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes of each step, those over the reference too; evaluations do not count."""
    counted = 0
    measure = loop.measure

    def measured(*arguments: Any) -> Any:
        nonlocal counted
        found: list[Any] = []
        counted += count(lambda: found.append(measure(*arguments)))
        return found[0]

    monkeypatch.setattr(loop, "measure", measured)
    hyper = {"micro_batch_size": micro}
    body = make_job(tmp_path, method=method, hyper=hyper, attention="eager", gradient_checkpointing=checkpointing)
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    steps = events_of(tmp_path / "run", "metrics")
    assert steps[-1].data["flops"] == pytest.approx(counted, rel=1e-3)
    forecast = read_json(tmp_path / "run" / "plan.json")["compute"]
    assert forecast["flops"] == pytest.approx(counted, rel=0.001 if micro == 1 and method != "kto" else 0.1)
    ended = last_event(tmp_path / "run").data
    assert ended["flops"] == steps[-1].data["flops"]
    assert ended["tokens"] == forecast["tokens"] == steps[-1].data["num_tokens"]


@pytest.mark.parametrize("more", [{}, {"packing": True}], ids=["auto", "packed"])
def test_the_forecast_with_fused_attention_is_what_the_run_computes(more: dict[str, Any], tmp_path: Path) -> None:
    """However many rows share a pass: each is attended to by itself."""
    hyper = {"batch_size": 8, "micro_batch_size": "auto", "max_seq_len": 128, **more}
    assert train_here(tmp_path / "run", make_job(tmp_path, rows=40, hyper=hyper)) == EXIT_FINISHED
    plan = read_json(tmp_path / "run" / "plan.json")
    assert plan["micro_batch_size"] > 1 or plan["packing"]
    assert plan["compute"]["flops"] == pytest.approx(last_event(tmp_path / "run").data["flops"], rel=1e-9)


def test_fused_attention_leaves_out_what_is_masked() -> None:
    assert make_load([19], 1, "eager").pairs == 19**2
    assert make_load([19], 1, "sdpa").pairs == 19**2 / 2
    causal = 10**2 / 2 + 9**2 / 2
    for kind, pairs in {"eager": 19**2, "sdpa": causal, "flash": causal}.items():
        packed = make_load([10, 9], 1, kind)
        assert (packed.pairs, packed.causal_pairs) == (pairs, causal)


def test_smollm2_takes_two_four_and_six_times_its_weights(tmp_path: Path) -> None:
    """Every place labelled; dense attention takes 69,120 FLOPs a token and place. Where no weight of the base is
    trained, 4N."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    facts = make_facts(Source(tmp_path, "smol", "digest"), config, Adapter(type="full"))
    assert facts.parameters == 134_515_008
    full = facts.matmuls
    assert (full.body, full.head, full.attention) == (SMOL.body, SMOL.head, SMOL.attention)
    load = make_load([256], 256, "eager")
    dense = 69_120 * 256
    assert count_forward(full, load).done / 256 == 2 * 134_479_872 + dense
    assert count_training(full, load, checkpointing=False).done / 256 == 3 * (2 * 134_479_872 + dense)
    assert count_training(SMOL, load, checkpointing=False).done / 256 == 4 * 134_479_872 + 3 * dense
    lora = make_facts(Source(tmp_path, "smol", "digest"), config, Adapter(r=8)).matmuls
    assert lora.adapter == 2_442_240
    again = count_training(full, load, checkpointing=True).done - count_training(full, load, checkpointing=False).done
    assert again / 256 == 2 * (106_168_320 - 30 * 576 * 1536) + dense, "all but the last product of each layer"


@pytest.mark.parametrize(("parameters", "tokens", "flops"), CHINCHILLA)
def test_training_from_scratch_takes_what_chinchilla_says(parameters: float, tokens: float, flops: float) -> None:
    weights = Matmuls(body=int(parameters), trained_body=int(parameters))
    pass_ = make_load([1], 1, "sdpa")
    assert count_training(weights, pass_, checkpointing=False).needed * tokens == pytest.approx(flops, rel=0.05)


def test_mfu_is_what_the_model_needs_over_what_the_device_could(tmp_path: Path) -> None:
    """One row a pass and no checkpointing: what is needed is what is done."""
    assert train_here(tmp_path / "run", make_job(tmp_path)) == EXIT_FINISHED
    peak = read_json(tmp_path / "run" / "plan.json")["compute"]["peak_flops_per_s"]
    assert 1e8 < peak < 1e15
    steps = [event.data for event in events_of(tmp_path / "run", "metrics")]
    before = 0.0
    for data in steps:
        assert data["mfu"] == pytest.approx((data["flops"] - before) / data["step_s"] / peak)
        before = data["flops"]
    ended = last_event(tmp_path / "run").data
    spent_s = sum(data["step_s"] for data in steps)
    assert ended["mfu"] == pytest.approx(before / spent_s / peak)
    assert ended["tokens_per_s"] == pytest.approx(ended["tokens"] / spent_s)
    parameters = read_json(tmp_path / "run" / "plan.json")["parameters"]
    assert ended["tokens_per_parameter"] == ended["tokens"] / parameters


def test_what_is_computed_twice_is_no_use_of_the_device() -> None:
    load = make_load([10, 9], 19, "eager")
    plain, again = (count_training(SMOL, load, checkpointing=checkpointing) for checkpointing in (False, True))
    assert again.done > plain.done
    assert again.needed == plain.needed < plain.done


def test_an_interrupted_run_counts_the_flops_of_the_whole(tmp_path: Path) -> None:
    body = make_job(tmp_path)
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 9)) == EXIT_STOPPED
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert last_event(tmp_path / "run").data["flops"] == last_event(tmp_path / "whole").data["flops"] > 0


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 67e12, 989.5e12),
        ("NVIDIA H100 PCIe", 51e12, 756.5e12),
        ("NVIDIA H200", 67e12, 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 19.5e12, 312e12),
        ("NVIDIA A100 80GB PCIe", 19.5e12, 312e12),
        ("NVIDIA A10", 31.2e12, 125e12),
        ("NVIDIA A10G", 35e12, 70e12),
        ("NVIDIA L4", 30.3e12, 121e12),
        ("NVIDIA L40S", 91.6e12, 362.05e12),
        ("Tesla V100-SXM2-16GB", 15.7e12, None),
        ("Tesla T4", 8.1e12, None),
        ("NVIDIA GeForce RTX 4090", 82.6e12, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA RTX A6000", 38.7e12, 154.8e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA T400", None, None),
        ("Somebody's GPU", None, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(name: str, fp32: float | None, bf16: float | None) -> None:
    gpu = Gpu(index=0, name=name, memory_bytes=2**34, compute_capability=(8, 0))
    assert (find_peak(gpu, "fp32"), find_peak(gpu, "bf16")) == (fp32, bf16)
