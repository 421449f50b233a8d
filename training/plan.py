"""What will run: every `auto` of a spec resolved, each by a published rule, with the reason beside the number."""

from typing import Any, Literal

from training.adapter import Adapter
from training.automatic import (
    decide_packing,
    make_batch_size,
    make_beta,
    make_decay_steps,
    make_every,
    make_learning_rate,
    make_length,
    make_save_total_limit,
    make_warmup_steps,
)
from training.devices import SHARDS_STATES, Layout, Offload, Schedule, Strategy
from training.errors import SpecError
from training.facts import Counts, DataFacts, Fact, ModelFacts
from training.fields import Auto
from training.flops import Compute, forecast_compute
from training.hardware import CPU_FORMATS, Format, Hardware
from training.memory import Memory, forecast_memory
from training.mixes import require_fit
from training.peaks import find_peak
from training.spec import (
    Attention,
    EarlyStopping,
    Hyperparameters,
    JobSpec,
    KtoHyperparameters,
    Optimizer,
    PreferenceHyperparameters,
    Stability,
    SupervisedHyperparameters,
)

GIB = 2**30
DEFAULT_SEED = 0
BUSY_TOKENS = {"cuda": 8192, "cpu": 448}
"""Where a device is busy with rows of usual models; more in one pass cost memory and gain little."""
BUSY_PASSES = 4
"""For each rank of a pipeline: where the time in which ranks wait for each other is small."""


class Plan(Fact):
    """A run with no `auto` left. `reasons` says for each number that was automatic where it comes from."""

    plan_version: Literal[1] = 1
    device: Literal["cuda", "cpu"]
    ranks: int
    "Processes, each with a device: data x context x tensor x pipeline."
    strategy: Strategy = "none"
    data: int = 1
    "Ranks among which the rows of a batch are shared."
    tensor: int = 1
    pipeline: int = 1
    schedule: Schedule | None = None
    "None without a pipeline."
    expert: int = 1
    context: int = 1
    "Ranks among which the tokens of a pass are split."
    nodes: int = 1
    "Hosts, among which the ranks are shared evenly."
    offload: Offload = "none"
    deepspeed: dict[str, Any] | None = None
    "What was given of a DeepSpeed config; it is laid over what is derived."
    seed: int
    steps: int
    steps_per_epoch: int
    n_epochs: float
    batch_size: int
    micro_batch_size: int
    tokens_per_pass: int | None = None
    "Where nobody asked for a micro-batch: as many tokens as its longest rows have; of shorter ones more rows fit."
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
    activation_offloading: bool = False
    attention: Attention
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
    layout = spec.layout
    device = choose_device(spec, hardware)
    precision = _precision(spec, hardware, device, why)
    max_seq_len = make_max_seq_len(spec, model.context_tokens, data.longest_tokens, why)
    batch = make_batch_size(spec, data.examples, why)
    micro, checkpointing, offloading = _fit(spec, hardware, device, precision, model, data, max_seq_len, batch, why)
    epochs, steps, steps_per_epoch = make_length(asked, data, batch, why)
    attention = _attention(spec, hardware, device, precision, model, why)
    shared = _share_passes(spec, device, data, max_seq_len, micro, batch // layout.data)
    require_fit(layout, model, attention)
    if layout.pipeline > 1 and spec.parallelism.schedule == "auto":
        why["schedule"] = (
            f"in a step a rank waits for others as long as {layout.pipeline - 1} passes take; interleaved is half of "
            "that, for twice the messages"
        )
    if layout.copies == layout.ranks > 1 and spec.parallelism.strategy == "auto":
        kept = "the whole model" if layout.expert == 1 else "all but the experts of others"
        why["strategy"] = f"each device keeps {kept} and gradients are summed, which costs least time; see fsdp"
    return Plan(
        device=device,
        ranks=layout.ranks,
        strategy=layout.strategy,
        data=layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        schedule=layout.schedule,
        expert=layout.expert,
        context=layout.context,
        nodes=layout.nodes,
        offload=spec.parallelism.offload,
        deepspeed=spec.deepspeed.as_config() if spec.deepspeed else None,
        seed=DEFAULT_SEED if spec.seed is None else spec.seed,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        n_epochs=epochs,
        batch_size=batch,
        micro_batch_size=micro,
        tokens_per_pass=shared[1] if shared else None,
        gradient_accumulation_steps=batch // (micro * layout.data),
        learning_rate=make_learning_rate(spec, model, why),
        lr_scheduler=asked.lr_scheduler,
        warmup_steps=make_warmup_steps(asked, steps, why),
        decay_steps=make_decay_steps(asked, steps, why),
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.max_grad_norm,
        optimizer=_optimizer(spec, device),
        max_seq_len=max_seq_len,
        truncation=asked.truncation,
        packing=decide_packing(asked, why),
        train_on=asked.train_on if isinstance(asked, SupervisedHyperparameters) else None,
        eval_steps=make_every("eval_steps", asked.eval_steps, steps, why) if data.validation_rows else None,
        save_steps=make_every("save_steps", asked.save_steps, steps, why),
        save_total_limit=make_save_total_limit(asked, model, why),
        early_stopping=asked.early_stopping,
        stability=spec.stability,
        precision=precision,
        gradient_checkpointing=checkpointing,
        activation_offloading=offloading,
        attention=attention,
        parameters=model.parameters,
        trained_parameters=model.trained_parameters,
        quantised_parameters=model.quantised_parameters,
        lora_plus_ratio=spec.adapter.lora_plus_ratio,
        memory=forecast_memory(
            spec,
            precision,
            model,
            data,
            max_seq_len,
            micro,
            checkpointing,
            offloading,
            shared,
            device,
            batch // (micro * layout.data),
        ),
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


def choose_device(spec: JobSpec, hardware: Hardware) -> Literal["cuda", "cpu"]:
    """Raises SpecError where the host has not what was asked for."""
    asked, param, nodes = spec.resources.gpus, "resources.gpus", spec.layout.nodes
    if asked == 0:
        return "cpu"
    if asked != "auto" and asked // nodes > len(hardware.gpus):
        share = f" on {nodes} nodes, {asked // nodes} on each" if nodes > 1 else ""
        message = f"{param}: {asked} asked{share}, this host has {len(hardware.gpus)}"
        raise SpecError(message, param=param, code="no_such_device")
    ranks = spec.layout.ranks
    if asked == "auto" and hardware.gpus and ranks > 1:
        message = f'{param}: "auto" is one GPU, and parallelism asks for {ranks} ranks; set {ranks} here'
        raise SpecError(f"{message}, or 0 for ranks on the CPU", param=param)
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


def _attention(
    spec: JobSpec, hardware: Hardware, device: str, precision: Format, model: ModelFacts, why: dict[str, str]
) -> Attention:
    if spec.attention == "sdpa" and not model.has_fused_attention:
        message = f'attention: transformers has no fused attention for {model.family}; set "eager" or "auto"'
        raise SpecError(message, param="attention")
    if spec.attention == "flash" and (missing := _lack_for_flash_attention(hardware, device, precision)):
        message = f'attention: "flash" {missing}; "sdpa", PyTorch\'s own fused attention, runs everywhere'
        raise SpecError(message, param="attention")
    if spec.attention != "auto":
        return spec.attention
    if not model.has_fused_attention:
        why["attention"] = f"transformers has no fused attention for {model.family}"
        return "eager"
    why["attention"] = (
        "PyTorch's fused attention never stores the attention matrix (Dao et al. 2022); every host has it, so that "
        "a run can go on anywhere"
    )
    return "sdpa"


def _lack_for_flash_attention(hardware: Hardware, device: str, precision: Format) -> str | None:
    """What keeps this host from it."""
    if device == "cpu":
        return "runs on GPUs only, and this run is on the CPU"
    if not hardware.gpus[0].runs_flash_attention:
        return f"needs a GPU of compute capability 8.0 or later, and this is a {hardware.gpus[0].name}"
    if precision == "fp32":
        return "computes in bf16 or fp16, and the precision is fp32"
    if not hardware.has_flash_attention:
        return "needs version 2 of the package flash-attn, which this host does not have"
    return None


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
) -> tuple[int, bool, bool]:
    """Micro-batch, checkpointing and offloading: as many rows as fit; checkpointing only where one row does not fit
    without it, since it costs about a third more time (Chen et al. 2016); offloading only where that is not enough."""
    asked = spec.hyper
    # A host's memory is shared with everything else on it, and its allocator keeps some of what was freed.
    host_bytes = 0.6 * hardware.memory_bytes / spec.layout.local_ranks
    room_bytes = 0.85 * hardware.gpus[0].memory_bytes if device == "cuda" else host_bytes
    batch //= spec.layout.data  # what comes to each rank

    def forecast(micro: int, checkpointing: bool, offloading: bool) -> Memory:
        shared = _share_passes(spec, device, data, max_seq_len, micro, batch)
        passes = batch // micro
        return forecast_memory(
            spec, precision, model, data, max_seq_len, micro, checkpointing, offloading, shared, device, passes
        )

    def fits(micro: int, checkpointing: bool, offloading: bool) -> bool:
        return forecast(micro, checkpointing, offloading).total_bytes < room_bytes

    smallest = _given_micro(asked, batch) or 1
    offloading = _asked_offloading(spec, device, why)
    checkpointing = _asked_checkpointing(spec)
    if checkpointing == "auto":
        checkpointing = not fits(smallest, False, offloading is True)
        why["gradient_checkpointing"] = (
            "one pass would not fit without it" if checkpointing else "one pass fits without it, which is faster"
        )
    if offloading == "auto":
        offloading = not fits(smallest, checkpointing, False)
        why["activation_offloading"] = "one pass fits without it, which is faster"
        if offloading:
            moved = forecast(smallest, checkpointing, False).activations_bytes
            moved -= forecast(smallest, checkpointing, True).activations_bytes
            why["activation_offloading"] = (
                f"one pass would not fit without it; about {moved / GIB:.1f} GiB of each pass wait on the host"
            )
    if given := _given_micro(asked, batch):
        return given, checkpointing, offloading
    if not may_share_a_pass(spec.adapter):
        why["micro_batch_size"] = "8-bit layers, prefixes and prompts take one row a pass"
        return 1, checkpointing, offloading
    longest, busy = min(data.longest_tokens, max_seq_len), BUSY_TOKENS[device] * spec.layout.context
    divisors = [n for n in range(batch, 0, -1) if batch % n == 0]
    why["micro_batch_size"] = f"the largest share of the batch that fits, up to {busy} tokens a pass"
    if spec.layout.pipeline > 1:
        passes = min(batch, BUSY_PASSES * spec.layout.pipeline)
        divisors = [n for n in divisors if batch // n >= passes]
        why["micro_batch_size"] += f", and {BUSY_PASSES} passes for each rank of the pipeline (Huang et al. 2019)"
    for micro in divisors:
        if micro * longest <= busy and fits(micro, checkpointing, offloading):
            return micro, checkpointing, offloading
    return 1, checkpointing, offloading


def _share_passes(
    spec: JobSpec, device: str, data: DataFacts, max_seq_len: int, micro: int, batch: int
) -> tuple[int, int] | None:
    """Where a pass takes as many rows of a step as fit by their tokens, and not a micro-batch: how many of both."""
    # A pipeline is kept busy by the number of passes, which is not to depend on how long the rows are.
    if _given_micro(spec.hyper, 1) is not None or not may_share_a_pass(spec.adapter) or spec.layout.pipeline > 1:
        return None
    busy = BUSY_TOKENS[device] * spec.layout.context
    return batch, min(micro * min(data.longest_tokens, max_seq_len), busy)


def _asked_checkpointing(spec: JobSpec) -> bool | Auto:
    if spec.adapter.type != "prefix":
        return spec.gradient_checkpointing
    if spec.gradient_checkpointing is True:
        param = "gradient_checkpointing"
        raise SpecError(f"{param}: a prefix is kept in a cache, which it cannot have; set it to false", param=param)
    return False


def _asked_offloading(spec: JobSpec, device: str, why: dict[str, str]) -> bool | Auto:
    asked = spec.activation_offloading
    if asked == "auto" and (reason := _lack_for_offloading(spec.layout)):
        why["activation_offloading"] = f"not together with {reason}"
        return False
    if device == "cuda" or asked is False:
        return asked
    if asked is True:
        param = "activation_offloading"
        message = f"{param}: the run is on the CPU, whose memory is where activations would be moved; leave it out"
        raise SpecError(message, param=param)
    why["activation_offloading"] = "on a CPU activations are in the host's memory anyway"
    return False


def _lack_for_offloading(layout: Layout) -> str | None:
    """What it does not go together with; asked for, it is refused (mixes.py)."""
    if layout.tensor > 1:
        return "parallelism.tensor"
    if layout.strategy in SHARDS_STATES:
        return f"{layout.strategy}, which moves tensors by itself"
    if layout.pipeline > 1:
        return "a pipeline, where several passes are under way at once"
    return "experts that are split" if layout.expert > 1 else None


def _given_micro(asked: Hyperparameters, batch: int) -> int | None:
    if asked.micro_batch_size != "auto":
        return asked.micro_batch_size
    if asked.gradient_accumulation_steps != "auto":
        return batch // asked.gradient_accumulation_steps
    return None
