"""Every `auto` is resolved by a published rule; numbers are held against the closed form or the paper's table."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from training.errors import SpecError
from training.facts import Counts, DataFacts, ModelFacts
from training.hardware import Gpu, Hardware
from training.plan import Plan, make_plan
from training.spec import parse_spec

ROOT = Path(__file__).parents[2]
A100 = Gpu(index=0, name="NVIDIA A100", memory_bytes=80 * 2**30, compute_capability=(8, 0))
V100 = Gpu(index=0, name="NVIDIA V100", memory_bytes=16 * 2**30, compute_capability=(7, 0))
CPU = Hardware(cpu_cores=2, memory_bytes=24 * 2**30)
SMOL = ModelFacts(
    family="llama", hidden_size=576, intermediate_size=1536, layers=30, vocabulary=49152, parameters=134_515_008,
    trained_parameters=2_442_240, context_tokens=8192,
)  # fmt: skip


def plan_for(
    rows: int = 100,
    hardware: Hardware = CPU,
    model: ModelFacts = SMOL,
    longest: int = 200,
    validation_rows: int = 0,
    hyper: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    given = {} if hyper is None else {"hyperparameters": hyper}
    spec = parse_spec({"model": "m", "training_file": "f", **given, **more})
    data = DataFacts(
        counts=Counts(rows=rows, trained_rows=rows), examples=rows,
        longest_tokens=longest, longest_trained_tokens=longest // 2,
        tokens=rows * longest, trained_tokens=rows * longest // 2, validation_rows=validation_rows,
    )  # fmt: skip
    return make_plan(spec, hardware, model, data)


def test_no_auto_is_left_and_each_automatic_number_has_its_reason() -> None:
    plan = plan_for(validation_rows=5)
    assert "auto" not in str(plan.as_json())
    automatic = {"n_epochs", "batch_size", "micro_batch_size", "learning_rate", "warmup_steps", "max_seq_len"}
    automatic |= {"eval_steps", "save_steps", "precision", "gradient_checkpointing", "attention", "save_total_limit"}
    automatic |= {"packing", "activation_offloading"}
    assert set(plan.reasons) == automatic
    asked = {"n_epochs": 1, "batch_size": 2, "micro_batch_size": 1, "learning_rate": 1e-4, "warmup_steps": 0}
    asked |= {"max_seq_len": 64, "eval_steps": 3, "save_steps": 3, "save_total_limit": 2, "packing": False}
    switches = {"gradient_checkpointing": False, "activation_offloading": False}
    settled = plan_for(hyper=asked, precision="fp32", attention="eager", **switches)
    assert settled.reasons == {}


def test_a_family_without_fused_attention_is_computed_eagerly_and_says_so() -> None:
    model = SMOL.model_copy(update={"has_fused_attention": False, "family": "gemma2"})
    plan = plan_for(model=model)
    assert plan.attention == "eager"
    assert plan.reasons["attention"] == "transformers has no fused attention for gemma2"
    with pytest.raises(
        SpecError, match=r'attention: .* no fused attention for gemma2; set "eager" or "auto"'
    ) as refused:
        plan_for(model=model, attention="sdpa")
    assert refused.value.param == "attention"


def test_eager_attention_keeps_its_matrices_over_the_whole_pass() -> None:
    """Of each head and layer the scores, their softmax in fp32, and that in the compute type: 12 bytes in fp32."""
    model = SMOL.model_copy(update={"attention_heads": 9})
    of = {
        (attention, micro): plan_for(
            model=model, attention=attention, gradient_checkpointing=False, hyper={"micro_batch_size": micro}
        ).memory.activations_bytes
        for attention in ("sdpa", "eager")
        for micro in (1, 4)
    }
    for micro in (1, 4):
        assert of["eager", micro] - of["sdpa", micro] == 30 * 9 * (micro * 200) ** 2 * 12


def test_adapted_experts_are_kept_with_their_adapter() -> None:
    model = SMOL.model_copy(update={"stacked_parameters": 30 * 10**6})
    of = [
        plan_for(model=facts, gradient_checkpointing=checkpointing).memory.activations_bytes
        for facts in (model, SMOL)
        for checkpointing in (False, True)
    ]
    assert of[0] - of[2] == (30 + 1) * 4 * 10**6, "each layer's sum, and one gradient"
    assert of[1] - of[3] == (1 + 1) * 4 * 10**6, "one layer's at a time"


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "steps"),
    [(10, 1, 4, 3), (10, 2, 4, 6), (10, 0.5, 4, 2), (3, 0.5, 1, 2), (10, 2.5, 4, 8), (10, 0.3, 1, 3), (1, 3, 1, 3)],
)
def test_steps_are_whole_windows_of_each_epoch(rows: int, epochs: float, batch: int, steps: int) -> None:
    plan = plan_for(rows, hyper={"n_epochs": epochs, "batch_size": batch})
    assert plan.steps == steps
    assert plan.steps_per_epoch == math.ceil(rows / batch)


def test_max_steps_is_the_number_of_steps_whatever_the_rows() -> None:
    plan = plan_for(10, hyper={"max_steps": 7, "batch_size": 4})
    assert (plan.steps, plan.n_epochs) == (7, 7 / 3)


@pytest.mark.parametrize(
    ("rows", "epochs"), [(1, 25), (10, 10), (33, 3), (100, 3), (8333, 3), (10_000, 2), (50_000, 1)]
)
def test_automatic_epochs_keep_the_examples_between_a_hundred_and_25000(rows: int, epochs: float) -> None:
    assert plan_for(rows).n_epochs == epochs


@pytest.mark.parametrize(
    ("rows", "asked", "batch", "micro"),
    [
        (2, {}, 2, 2),
        (100, {}, 4, 2),
        (5000, {}, 10, 2),
        (10**6, {}, 32, 2),
        (100, {"micro_batch_size": 3}, 6, 3),
        (100, {"gradient_accumulation_steps": 5}, 5, 1),
        (100, {"micro_batch_size": 3, "gradient_accumulation_steps": 5}, 15, 3),
        (100, {"batch_size": 12, "gradient_accumulation_steps": 3}, 12, 4),
    ],
)
def test_batch_is_micro_batch_times_accumulation(rows: int, asked: dict[str, int], batch: int, micro: int) -> None:
    plan = plan_for(rows, hyper=asked)
    assert (plan.batch_size, plan.micro_batch_size) == (batch, micro)
    assert plan.batch_size == plan.micro_batch_size * plan.gradient_accumulation_steps


def test_shorter_rows_share_a_pass_unless_a_micro_batch_was_asked_for() -> None:
    """On a CPU, which 448 tokens keep busy."""
    assert plan_for(longest=100).tokens_per_pass == 4 * 100
    assert plan_for(longest=600).tokens_per_pass == 448, "a longer row has a pass of its own"
    for asked in ({"micro_batch_size": 2}, {"gradient_accumulation_steps": 2}):
        assert plan_for(hyper=asked).tokens_per_pass is None
    assert plan_for(adapter={"type": "prompt"}).tokens_per_pass is None


def test_a_gpu_gets_as_many_rows_in_a_pass_as_fit() -> None:
    gpu = Hardware(gpus=(A100,), cpu_cores=8, memory_bytes=2**37)
    assert plan_for(hardware=gpu, hyper={"batch_size": 16}).micro_batch_size == 16
    assert plan_for(hardware=gpu, longest=4096, hyper={"batch_size": 16}).micro_batch_size == 2


def test_checkpointing_is_chosen_only_where_one_row_does_not_fit() -> None:
    big = SMOL.model_copy(
        update={"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "parameters": 8 * 10**9}
    )
    small_gpu = Hardware(gpus=(A100.model_copy(update={"memory_bytes": 24 * 2**30}),), cpu_cores=8, memory_bytes=2**37)
    assert not plan_for(hardware=small_gpu, model=big, longest=512).gradient_checkpointing
    assert plan_for(hardware=small_gpu, model=big, longest=8192).gradient_checkpointing
    host = CPU.model_copy(update={"memory_bytes": 16 * 2**30})
    assert plan_for(hardware=host, longest=8192).gradient_checkpointing, "an 8k row of a small model fills 16 GiB"
    assert not plan_for(hardware=host, longest=8192, gradient_checkpointing=False).gradient_checkpointing


def test_offloading_is_chosen_only_where_checkpointing_is_not_enough() -> None:
    big = SMOL.model_copy(
        update={"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "parameters": 8 * 10**9}
    )
    small_gpu = Hardware(gpus=(A100.model_copy(update={"memory_bytes": 22 * 2**30}),), cpu_cores=8, memory_bytes=2**37)

    def chosen(longest: int, **asked: Any) -> tuple[bool, bool]:
        plan = plan_for(hardware=small_gpu, model=big, longest=longest, **asked)
        assert plan.memory.total_bytes < 0.85 * 22 * 2**30
        return plan.gradient_checkpointing, plan.activation_offloading

    assert chosen(512) == (False, False)
    assert chosen(4096) == (True, False)
    assert chosen(8192) == (True, True)
    assert chosen(4096, gradient_checkpointing=False) == (False, True)
    assert chosen(4096, activation_offloading=True) == (False, True), "what was asked for is counted with"
    both = plan_for(hardware=small_gpu, model=big, longest=8192)
    # All inputs of layers but one wait on the host: bf16, 8,192 tokens, 4096 wide.
    assert f"{31 * 2 * 8192 * 4096 / 2**30:.1f} GiB of each pass wait" in both.reasons["activation_offloading"]


def test_on_a_cpu_activations_are_on_the_host_already() -> None:
    plan = plan_for(longest=8192)
    assert not plan.activation_offloading
    assert "anyway" in plan.reasons["activation_offloading"]
    assert not plan_for(activation_offloading=False).activation_offloading
    with pytest.raises(SpecError, match="on the CPU, whose memory") as refused:
        plan_for(activation_offloading=True)
    assert refused.value.param == "activation_offloading"


def test_what_offloading_leaves_on_the_device_is_one_layer() -> None:
    gpu = Hardware(gpus=(A100,), cpu_cores=8, memory_bytes=2**37)
    layer = 2 * 200 * (12 * 576 + 4 * 1536)
    for checkpointing in (False, True):
        switches = {"gradient_checkpointing": checkpointing, "activation_offloading": True}
        plan = plan_for(hardware=gpu, hyper={"micro_batch_size": 1}, **switches)
        assert plan.memory.activations_bytes == layer + 2 * 200 * 576


def test_the_learning_rate_is_the_published_rule() -> None:
    """Schulman et al. 2025: 5e-5 x 10 x (2000 / h)^0.781 for Llama, ^0.0775 for Qwen; a tenth of it for all weights."""
    llama = SMOL.model_copy(update={"hidden_size": 4096})
    qwen = llama.model_copy(update={"family": "qwen3"})
    assert plan_for(model=llama).learning_rate == pytest.approx(5e-4 * (2000 / 4096) ** 0.781, rel=5e-3)
    assert plan_for(model=qwen).learning_rate == pytest.approx(5e-4 * (2000 / 4096) ** 0.0775, rel=5e-3)
    full = plan_for(model=llama, adapter={"type": "full"}).learning_rate
    assert plan_for(model=llama).learning_rate == pytest.approx(10 * full, rel=1e-2)
    doubled = plan_for(model=llama, hyper={"learning_rate_multiplier": 2}).learning_rate
    assert doubled == pytest.approx(2 * plan_for(model=llama).learning_rate, rel=1e-2)
    assert plan_for(hyper={"learning_rate": 3e-3}).learning_rate == 3e-3


@pytest.mark.parametrize(
    ("method", "adapter", "rate"),
    [
        ("supervised", "ia3", 3e-3),
        ("supervised", "prefix", 5e-3),
        ("supervised", "prompt", 1e-3),
        ("dpo", "lora", 1e-5),
        ("dpo", "qlora", 1e-5),
        ("kto", "lora", 5e-6),
    ],
)
def test_small_adapters_and_preferences_have_published_rates(method: str, adapter: str, rate: float) -> None:
    plan = plan_for(method={"type": method}, adapter={"type": adapter})
    assert plan.learning_rate == rate
    assert plan.reasons["learning_rate"].startswith(f"{rate:.0e}".replace("e-0", "e-"))


def test_the_reference_point_of_kto_has_sixteen_rows_at_least() -> None:
    assert plan_for(100, method={"type": "kto"}).batch_size == 16
    assert plan_for(12, method={"type": "kto"}).batch_size == 12
    assert plan_for(10**6, method={"type": "kto"}).batch_size == 32
    assert plan_for(100, method={"type": "kto", "kto": {"hyperparameters": {"batch_size": 8}}}).batch_size == 8


# What the documents say


def all_reasons() -> set[str]:
    """What any plan gives a reason for: methods, kinds of adapters and devices, each with all left automatic."""
    hosts = [CPU, Hardware(gpus=(A100,), cpu_cores=8, memory_bytes=2**37)]
    specs: list[dict[str, Any]] = [{"method": {"type": method}} for method in ("supervised", "pretrain", "dpo", "kto")]
    specs += [{"adapter": {"type": kind}} for kind in ("qlora", "ia3", "prefix", "prompt", "full")]
    specs.append({"method": {"type": "pretrain", "pretrain": {"hyperparameters": {"lr_scheduler": "wsd"}}}})
    plans = [plan_for(hardware=host, validation_rows=3, **spec) for host in hosts for spec in specs]
    plans.append(plan_for(parallelism={"data": 2, "pipeline": 2}))
    return {name for plan in plans for name in plan.reasons}


def test_every_value_with_a_reason_is_in_the_table_of_automatic_values() -> None:
    table = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/automatic-values.md").read_text("utf-8"), re.MULTILINE)
    listed = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert listed == all_reasons()
    source = "".join((ROOT / "training" / name).read_text() for name in ("automatic.py", "plan.py"))
    assert set(re.findall(r'why\["(\w+)"\]', source)) <= listed


def test_precision_follows_the_device() -> None:
    on = {"cpu_cores": 8, "memory_bytes": 2**37}
    assert plan_for().precision == "fp32"
    assert plan_for(hardware=Hardware(gpus=(A100,), **on)).precision == "bf16"
    assert plan_for(hardware=Hardware(gpus=(V100,), **on)).precision == "fp32"
    with pytest.raises(SpecError, match="V100 does not compute in bf16"):
        plan_for(hardware=Hardware(gpus=(V100,), **on), precision="bf16")


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(SpecError, match="this host has 0"):
        plan_for(resources={"gpus": 1})
    gpus = Hardware(gpus=(A100, A100), cpu_cores=8, memory_bytes=2**37)
    assert plan_for(hardware=gpus, resources={"gpus": 0}).device == "cpu"
    with pytest.raises(SpecError, match="3 asked, this host has 2"):
        plan_for(hardware=gpus, resources={"gpus": 3})
    with pytest.raises(SpecError, match=r'resources\.gpus: "auto" is one GPU, and parallelism asks for 2 ranks; set 2'):
        plan_for(hardware=gpus, parallelism={"data": 2})


def test_a_length_beyond_the_context_of_the_model_is_refused() -> None:
    with pytest.raises(SpecError, match="8193 is more than the 8192 tokens"):
        plan_for(hyper={"max_seq_len": 8193})
    assert plan_for(longest=200).max_seq_len == 200
    assert plan_for(longest=20_000).max_seq_len == 8192


@pytest.mark.parametrize(("asked", "every"), [(0.1, 5), (0.02, 1), (7, 7), (0.001, 1), ("auto", 10)])
def test_shares_become_steps(asked: Any, every: int) -> None:
    plan = plan_for(validation_rows=2, hyper={"max_steps": 50, "save_steps": asked, "eval_steps": asked})
    assert (plan.save_steps, plan.eval_steps) == (every, every)


def test_without_a_validation_file_nothing_is_evaluated() -> None:
    assert plan_for(hyper={"eval_steps": 5}).eval_steps is None


def test_model_states_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, section 3.1: Adam in mixed precision takes 16 bytes a parameter: 7.5B take 120 GB. Here
    masters are the only copy of what is trained, so weights, gradient and moments are 4 + 4 + 8."""
    facts = SMOL.model_copy(update={"parameters": 7_500_000_000, "trained_parameters": 7_500_000_000})
    memory = plan_for(model=facts, adapter={"type": "full"}).memory
    assert memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes == 120 * 10**9


def test_the_forecast_is_near_what_was_measured() -> None:
    """SmolLM2-135M, fp32, all-linear LoRA, one row of 4,096 labelled tokens without checkpointing was seen to take
    10.3 GB of resident memory on a CPU, whose allocator keeps some of what was freed."""
    assert 0.7 < plan_for(longest=4096, gradient_checkpointing=False).memory.total_bytes / 10.3e9 < 1.0


def test_only_a_head_that_runs_in_parts_is_forecast_so() -> None:
    """Three fp32 numbers for each of 49,152 entries of the vocabulary and each labelled token, or for 2^28 bytes."""
    whole = SMOL.model_copy(update={"head_in_parts": False})
    assert plan_for(longest=4096, model=whole).memory.logits_bytes == 3 * 4 * 2048 * 49152
    assert plan_for(longest=4096).memory.logits_bytes == 3 * 2**28


def test_a_pass_that_is_filled_by_tokens_is_forecast_with_all_rows_that_it_may_have() -> None:
    """The longest row of 384 tokens, half of them trained, fills a pass of a CPU alone; of shorter rows two may give
    as many trained tokens each, three have no room. The lengths of rows are read from a mask of all pairs."""
    whole = SMOL.model_copy(update={"head_in_parts": False})
    of = {
        batch: plan_for(longest=384, model=whole, gradient_checkpointing=False, hyper={"batch_size": batch}).memory
        for batch in (1, 2, 3)
    }
    alone = plan_for(longest=384, model=whole, gradient_checkpointing=False, hyper={"micro_batch_size": 1}).memory
    assert of[1] == alone
    assert of[2].logits_bytes == 2 * alone.logits_bytes == of[3].logits_bytes == 3 * 4 * 384 * 49152
    assert of[2].activations_bytes - alone.activations_bytes == 8 * 384**2


def test_warm_up_is_three_percent_rounded_up() -> None:
    assert plan_for(hyper={"max_steps": 100}).warmup_steps == 3
    assert plan_for(hyper={"max_steps": 10}).warmup_steps == 1
    assert plan_for(hyper={"max_steps": 10, "warmup_steps": 50}).warmup_steps == 10
    assert plan_for(hyper={"max_steps": 10, "warmup_ratio": 0}).warmup_steps == 0
