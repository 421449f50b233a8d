"""What will run: every `auto` of a spec resolved, each by a published rule, with the reason beside the number."""

import math
from typing import Any, Literal

from training.adapter import Adapter
from training.errors import SpecError
from training.facts import Counts, DataFacts, Fact, ModelFacts
from training.fields import Steps
from training.flops import Compute, forecast_compute
from training.hardware import CPU_FORMATS, Format, Hardware
from training.memory import Memory, forecast_memory
from training.peaks import find_peak
from training.spec import (
    EarlyStopping,
    Hyperparameters,
    JobSpec,
    KtoHyperparameters,
    NextTokenHyperparameters,
    Optimizer,
    PreferenceHyperparameters,
    Stability,
    SupervisedHyperparameters,
)

GIB = 2**30
DEFAULT_SEED = 0
DEFAULT_WARMUP_RATIO = 0.03
DEFAULT_DECAY_RATIO = 0.2
CHECKPOINTS_ROOM_BYTES = 32 * GIB
SMALL_ADAPTER_RATES = {
    "ia3": (3e-3, "3e-3 for IA3 (Liu et al. 2022, section 4.1)"),
    "prefix": (1e-2, "1e-2 for prefix tuning, as in the examples of PEFT"),
    "prompt": (3e-2, "3e-2 for prompt tuning, as in the examples of PEFT"),
}
MAX_TOKENS_PER_FORWARD = 8192
"""Where a GPU is busy with rows of usual models; more rows in one pass cost memory and gain little."""


class Plan(Fact):
    """A run with no `auto` left. `reasons` says for each number that was automatic where it comes from."""

    plan_version: Literal[1] = 1
    device: Literal["cuda", "cpu"]
    ranks: int
    seed: int
    steps: int
    steps_per_epoch: int
    n_epochs: float
    batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"]
    warmup_steps: int
    decay_steps: int = 0
    "Of wsd: the steps at the end in which the rate falls."
    weight_decay: float
    max_grad_norm: float
    optimizer: Optimizer
    max_seq_len: int
    truncation: Literal["error", "drop", "truncate"]
    packing: bool = False
    train_on: Literal["assistant", "last", "all"] | None
    eval_steps: int | None
    "None where there is no validation file."
    save_steps: int
    save_total_limit: int
    early_stopping: EarlyStopping | None = None
    stability: Stability = Stability()
    precision: Format
    gradient_checkpointing: bool
    attention: Literal["sdpa", "eager"]
    parameters: int
    trained_parameters: int
    quantised_parameters: int = 0
    lora_plus_ratio: float = 1.0
    memory: Memory
    compute: Compute = Compute()
    counts: Counts
    reasons: dict[str, str]
    method: Literal["supervised", "dpo", "kto", "pretrain"] = "supervised"
    beta: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "memory_total_bytes": self.memory.total_bytes}


def make_plan(spec: JobSpec, hardware: Hardware, model: ModelFacts, data: DataFacts) -> Plan:
    """Resolve a spec. Pure: the same arguments give the same plan.

    Raises:
        SpecError: what was asked cannot run on this hardware, with what can.
    """
    why: dict[str, str] = {}
    asked = spec.hyper
    device = _device(spec, hardware)
    precision = _precision(spec, hardware, device, why)
    max_seq_len = make_max_seq_len(spec, model.context_tokens, data.longest_tokens, why)
    batch = _batch_size(asked, data.examples, why)
    micro, checkpointing = _fit(spec, hardware, device, precision, model, data, max_seq_len, batch, why)
    epochs, steps, steps_per_epoch = _length(asked, data, batch, why)
    attention = _attention(spec, why)
    return Plan(
        device=device,
        ranks=1,
        seed=DEFAULT_SEED if spec.seed is None else spec.seed,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        n_epochs=epochs,
        batch_size=batch,
        micro_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        learning_rate=_learning_rate(spec, model, why),
        lr_scheduler=asked.lr_scheduler,
        warmup_steps=_warmup_steps(asked, steps, why),
        decay_steps=_decay_steps(asked, steps, why),
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.max_grad_norm,
        optimizer=_optimizer(spec, device),
        max_seq_len=max_seq_len,
        truncation=asked.truncation,
        packing=_packing(asked, why),
        train_on=asked.train_on if isinstance(asked, SupervisedHyperparameters) else None,
        eval_steps=_every("eval_steps", asked.eval_steps, steps, why) if data.validation_rows else None,
        save_steps=_every("save_steps", asked.save_steps, steps, why),
        save_total_limit=_save_total_limit(asked, model, why),
        early_stopping=asked.early_stopping,
        stability=spec.stability,
        precision=precision,
        gradient_checkpointing=checkpointing,
        attention=attention,
        parameters=model.parameters,
        trained_parameters=model.trained_parameters,
        quantised_parameters=model.quantised_parameters,
        lora_plus_ratio=spec.adapter.lora_plus_ratio,
        memory=forecast_memory(spec, precision, model, data, max_seq_len, micro, checkpointing),
        compute=forecast_compute(
            spec,
            model,
            data,
            epochs=steps / steps_per_epoch,
            micro_batch_size=micro,
            attention=attention,
            checkpointing=checkpointing,
            peak_flops_per_s=find_peak(hardware.gpus[0], precision) if device == "cuda" else None,
        ),
        counts=data.counts,
        reasons=why,
        method=spec.method.type,
        beta=make_beta(asked, why) if isinstance(asked, PreferenceHyperparameters) else None,
        desirable_weight=asked.desirable_weight if isinstance(asked, KtoHyperparameters) else None,
        undesirable_weight=asked.undesirable_weight if isinstance(asked, KtoHyperparameters) else None,
    )


def make_beta(asked: PreferenceHyperparameters, why: dict[str, str] | None = None) -> float:
    if asked.beta != "auto":
        return asked.beta
    if why is not None:
        why["beta"] = "0.1 (Rafailov et al. 2023, appendix B; Ethayarajh et al. 2024)"
    return 0.1


def make_max_seq_len(
    spec: JobSpec, context_tokens: int | None, longest_tokens: int | None = None, why: dict[str, str] | None = None
) -> int:
    """The longest row that is trained: what was asked, else what the model's context and the data allow."""
    asked = spec.hyper.max_seq_len
    if context_tokens is not None:
        context_tokens -= spec.adapter.virtual_tokens
    if asked != "auto":
        if context_tokens is not None and asked > context_tokens:
            param = f"{spec.hyperparameters_path}.max_seq_len"
            raise SpecError(f"{param}: {asked} is more than the {context_tokens} tokens of the model", param=param)
        return asked
    if why is not None:
        why["max_seq_len"] = "the longest row, at most the model's context"
    limits = [limit for limit in (context_tokens, longest_tokens) if limit is not None]
    return min(limits) if limits else 2**31


def may_share_a_pass(adapter: Adapter) -> bool:
    """Whether rows may. In 8 bits inputs with outliers are kept in 16 bits (Dettmers et al. 2022); these are looked for
    over all rows of a pass, so that a row would be computed otherwise beside another one. A prefix or prompt stands
    before the first row of a pass only."""
    return adapter.virtual_tokens == 0 and (adapter.type != "qlora" or adapter.bits == 4)


def _device(spec: JobSpec, hardware: Hardware) -> Literal["cuda", "cpu"]:
    asked = spec.resources.gpus
    if asked == 0:
        return "cpu"
    if asked != "auto" and asked > len(hardware.gpus):
        param = "resources.gpus"
        raise SpecError(
            f"{param}: {asked} asked, this host has {len(hardware.gpus)}", param=param, code="no_such_device"
        )
    if asked != "auto" and asked > 1:
        raise SpecError("resources.gpus: more than one GPU a job is not offered yet", param="resources.gpus")
    return hardware.kind


def _precision(spec: JobSpec, hardware: Hardware, device: str, why: dict[str, str]) -> Format:
    name, formats = ("the CPU", CPU_FORMATS) if device == "cpu" else (hardware.gpus[0].name, hardware.gpus[0].formats)
    if spec.precision != "auto":
        if spec.precision not in formats:
            message = f"precision: {name} does not compute in {spec.precision}; it has {' and '.join(formats)}"
            raise SpecError(message, param="precision")
        return spec.precision
    if device == "cuda" and "bf16" in formats:
        why["precision"] = "the GPU computes in bf16: half the memory, fp32 masters (Micikevicius et al. 2018)"
        return "bf16"
    why["precision"] = "CPUs compute bf16 slowly" if device == "cpu" else "the GPU has no bf16"
    return "fp32"


def _optimizer(spec: JobSpec, device: str) -> Optimizer:
    asked = spec.hyper.optimizer
    if asked == "paged_adamw_8bit" and device == "cpu":
        param = f"{spec.hyperparameters_path}.optimizer"
        message = f'{param}: a CPU has no memory to page to; it has "adamw", "adamw_8bit" and "adafactor"'
        raise SpecError(message, param=param)
    return asked


def _attention(spec: JobSpec, why: dict[str, str]) -> Literal["sdpa", "eager"]:
    if spec.attention != "auto":
        return spec.attention
    why["attention"] = "PyTorch's fused attention never stores the attention matrix (Dao et al. 2022)"
    return "sdpa"


def _packing(asked: Hyperparameters, why: dict[str, str]) -> bool:
    if not isinstance(asked, NextTokenHyperparameters):
        return False
    if asked.packing != "auto":
        return asked.packing
    why["packing"] = "rows are laid end to end without padding either way; batch_size then counts rows"
    return False


def _batch_size(asked: Hyperparameters, rows: int, why: dict[str, str]) -> int:
    """About 0.2% of the rows, OpenAI's published default, kept within 4 to 32: below, steps are noise; above, LoRA
    loses against full fine-tuning ("LoRA Without Regret", Schulman et al. 2025)."""
    if asked.batch_size != "auto":
        return asked.batch_size
    unit = math.lcm(*(n for n in (asked.micro_batch_size, asked.gradient_accumulation_steps) if n != "auto"))
    if "auto" not in (asked.micro_batch_size, asked.gradient_accumulation_steps):
        why["batch_size"] = "micro_batch_size x gradient_accumulation_steps"
        return int(asked.micro_batch_size) * int(asked.gradient_accumulation_steps)
    wanted = min(max(4, round(0.002 * rows)), 32, rows)
    why["batch_size"] = "0.2% of the rows, from 4 to 32"
    return math.ceil(wanted / unit) * unit


def _fit(
    spec: JobSpec,
    hardware: Hardware,
    device: str,
    precision: str,
    model: ModelFacts,
    data: DataFacts,
    max_seq_len: int,
    batch: int,
    why: dict[str, str],
) -> tuple[int, bool]:
    """Micro-batch and checkpointing: as many rows as fit; checkpointing only where one row does not fit without it,
    since it costs about a third more time (Chen et al. 2016)."""
    asked = spec.hyper
    # A host's memory is shared with everything else on it, and its allocator keeps some of what was freed.
    room_bytes = 0.85 * hardware.gpus[0].memory_bytes if device == "cuda" else 0.6 * hardware.memory_bytes

    def fits(micro: int, checkpointing: bool) -> bool:
        memory = forecast_memory(spec, precision, model, data, max_seq_len, micro, checkpointing)
        return memory.total_bytes < room_bytes

    smallest = _given_micro(asked, batch) or 1
    checkpointing = spec.gradient_checkpointing
    if spec.adapter.type == "prefix":
        if checkpointing is True:
            param = "gradient_checkpointing"
            raise SpecError(f"{param}: a prefix is kept in a cache, which it cannot have; set it to false", param=param)
        checkpointing = False
    if checkpointing == "auto":
        checkpointing = not fits(smallest, False)
        why["gradient_checkpointing"] = (
            "one pass would not fit without it" if checkpointing else "one pass fits without it, which is faster"
        )
    if given := _given_micro(asked, batch):
        return given, checkpointing
    if not may_share_a_pass(spec.adapter):
        why["micro_batch_size"] = "8-bit layers, prefixes and prompts take one row a pass"
        return 1, checkpointing
    if device == "cpu":
        why["micro_batch_size"] = "on a CPU row after row is fastest: nothing is padded and nothing waits"
        return 1, checkpointing
    longest = min(data.longest_tokens, max_seq_len)
    divisors = [n for n in range(batch, 0, -1) if batch % n == 0]
    why["micro_batch_size"] = f"the largest share of the batch that fits, up to {MAX_TOKENS_PER_FORWARD} tokens a pass"
    for micro in divisors:
        if micro * longest <= MAX_TOKENS_PER_FORWARD and fits(micro, checkpointing):
            return micro, checkpointing
    return 1, checkpointing


def _given_micro(asked: Hyperparameters, batch: int) -> int | None:
    if asked.micro_batch_size != "auto":
        return asked.micro_batch_size
    if asked.gradient_accumulation_steps != "auto":
        return batch // asked.gradient_accumulation_steps
    return None


def _length(asked: Hyperparameters, data: DataFacts, batch: int, why: dict[str, str]) -> tuple[float, int, int]:
    """Epochs, steps, steps of a whole epoch. An epoch ends with its own last, maybe smaller, window: no row is dropped
    or carried over. Automatic epochs follow OpenAI's published rule: 3, but at least 100 and at most 25,000 examples.
    """
    rows = data.counts.trained_rows if _packing(asked, {}) else data.examples
    steps_per_epoch = math.ceil(data.examples / batch)
    if asked.max_steps is not None:
        return asked.max_steps / steps_per_epoch, asked.max_steps, steps_per_epoch
    epochs = asked.n_epochs
    if epochs == "auto":
        epochs = 3.0
        if rows * 3 < 100:
            epochs = float(min(25, 100 // rows))
        elif rows * 3 > 25_000:
            epochs = float(max(1, 25_000 // rows))
        why["n_epochs"] = "3, but at least 100 and at most 25,000 examples in all, and at most 25 epochs"
    whole = math.floor(epochs)
    # Rounded first: 0.1 + 0.2 epochs of 10 rows are 3 rows, not 4.
    part = math.ceil(round(data.examples * (epochs - whole), 6) / batch)
    return epochs, whole * steps_per_epoch + part, steps_per_epoch


_PREFERENCE_RATES = {
    "dpo": (1e-6, "1e-6 (Rafailov et al. 2023, appendix B)"),
    "kto": (5e-7, "5e-7 (Ethayarajh et al. 2024)"),
}


def _learning_rate(spec: JobSpec, model: ModelFacts, why: dict[str, str]) -> float:
    """5e-5 x (2000 / hidden size)^p, ten times that for LoRA ("LoRA Without Regret", Schulman et al. 2025); p was
    fitted as 0.781 on Llama and 0.0775 on Qwen, on models from 2048 wide on: narrower ones are taken as 2048. For
    answers that are compared with the base model's, the rates of the papers, likewise ten times that for LoRA."""
    asked = spec.hyper
    if asked.learning_rate != "auto":
        return asked.learning_rate
    if spec.method.type in _PREFERENCE_RATES:
        rate, why["learning_rate"] = _PREFERENCE_RATES[spec.method.type]
    else:
        power = 0.0775 if "qwen" in model.family else 0.781
        rate = 5e-5 * (2000 / max(model.hidden_size, 2048)) ** power
        why["learning_rate"] = f"5e-5 x (2000 / hidden size)^{power:g}"
    if spec.adapter.is_low_rank:
        rate *= 10
        why["learning_rate"] += ", times 10 for LoRA"
    if spec.adapter.type in SMALL_ADAPTER_RATES:
        rate, why["learning_rate"] = SMALL_ADAPTER_RATES[spec.adapter.type]
    if asked.learning_rate_multiplier != "auto":
        rate *= asked.learning_rate_multiplier
        why["learning_rate"] += f", times the multiplier {asked.learning_rate_multiplier:g}"
    return float(f"{rate:.3g}")


def _warmup_steps(asked: Hyperparameters, steps: int, why: dict[str, str]) -> int:
    if asked.warmup_steps is not None:
        return min(asked.warmup_steps, steps)
    ratio = DEFAULT_WARMUP_RATIO if asked.warmup_ratio is None else asked.warmup_ratio
    if asked.warmup_ratio is None:
        why["warmup_steps"] = "3% of the run (QLoRA, Dettmers et al. 2023, appendix B)"
    return math.ceil(ratio * steps)


def _decay_steps(asked: Hyperparameters, steps: int, why: dict[str, str]) -> int:
    """What the warm-up leaves of the share that was asked for."""
    if asked.lr_scheduler != "wsd":
        return 0
    if asked.decay_ratio is None:
        why["decay_steps"] = "the last 20% of the run (Haegele et al. 2024)"
    ratio = DEFAULT_DECAY_RATIO if asked.decay_ratio is None else asked.decay_ratio
    return min(math.ceil(round(ratio * steps, 6)), steps - _warmup_steps(asked, steps, {}))


def _every(name: str, asked: Steps, steps: int, why: dict[str, str]) -> int:
    """An interval in steps. Automatic: a tenth of the run, so that the curve has points and little is lost."""
    if asked == "auto":
        why[name] = "a tenth of the run, at least 10 steps"
        return max(10, math.ceil(steps / 10))
    return max(1, round(asked * steps)) if asked < 1 else int(asked)


def _save_total_limit(asked: Hyperparameters, model: ModelFacts, why: dict[str, str]) -> int:
    """What is trained stands in a checkpoint in fp32 with Adam's two moments. Two at least: one may be damaged."""
    if asked.save_total_limit != "auto":
        return asked.save_total_limit
    why["save_total_limit"] = f"as many as take {CHECKPOINTS_ROOM_BYTES // GIB} GiB, from 2 to 10"
    return min(10, max(2, CHECKPOINTS_ROOM_BYTES // (12 * max(1, model.trained_parameters))))
