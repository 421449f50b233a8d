"""A user's DeepSpeed config: how ZeRO exchanges what it splits, laid over the config that is derived. What the other
fields of a job say, and what would change the numbers or write files, is refused by name."""

from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from training.devices import Strategy
from training.fields import Part, at, show, true_or_false, wrong

MAX_NUMBERS = 2**63 - 1
"""DeepSpeed's own word for no limit."""

_BATCH = "batch_size, micro_batch_size and gradient_accumulation_steps set it"
_PRECISION = "precision sets it"
_OFFLOAD = "parallelism.offload sets it"
_NUMBERS = "it would change what the run comes to"
_FILES = "a job writes into its own directory alone"
_CHECKPOINTS = "checkpoints are Burnish's own"
_PARALLEL = "parallelism says how a job is spread"

OURS = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), _BATCH),
    "managed_gradient_accumulation": _BATCH,
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "amp", "data_types", "torch_autocast"), _PRECISION),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), _NUMBERS),
    **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"), _NUMBERS),
    **dict.fromkeys(("sparse_gradients", "sparse_attention", "progressive_layer_drop", "eigenvalue"), _NUMBERS),
    **dict.fromkeys(("curriculum_learning", "data_efficiency", "dataloader_drop_last"), _NUMBERS),
    **dict.fromkeys(("quantize_training", "compression_training", "weight_quantization"), _NUMBERS),
    "optimizer": "hyperparameters.optimizer, learning_rate and weight_decay set it",
    "zero_allow_untested_optimizer": "hyperparameters.optimizer sets it",
    "zero_force_ds_cpu_optimizer": "hyperparameters.optimizer sets it",
    "scheduler": "hyperparameters.lr_scheduler sets it",
    "gradient_clipping": "hyperparameters.max_grad_norm sets it",
    "activation_checkpointing": "gradient_checkpointing sets it",
    "flops_profiler": "the plan and the metrics hold the operations",
    "memory_breakdown": "the metrics hold peak_memory_bytes",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "nebula", "aio"), _FILES),
    **dict.fromkeys(("checkpoint", "load_universal_checkpoint", "datastates_ckpt"), _CHECKPOINTS),
    **dict.fromkeys(("elasticity", "autotuning"), "resources and parallelism set it"),
    **dict.fromkeys(("pipeline", "tensor_parallel", "autotp_size", "sequence_parallel_size", "moe"), _PARALLEL),
    **dict.fromkeys(("expert_parallel", "use_data_before_expert_parallelism"), _PARALLEL),
    **dict.fromkeys(("compile", "hybrid_engine", "inference"), "a job compiles nothing and serves nothing"),
    **dict.fromkeys(("steps_per_print", "timers", "log_level", "seed"), "Burnish sets it"),
}
"""Keys of a DeepSpeed config that are not to be given, with the reason."""

OURS_OF_ZERO = {
    "stage": "parallelism.strategy sets it",
    **dict.fromkeys(("offload_optimizer", "offload_param", "zenflow"), _OFFLOAD),
    **dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"), _OFFLOAD),
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_nontrainable_weights"), _NUMBERS),
    "zero_quantized_gradients": _NUMBERS,
    "round_robin_gradients": "DeepSpeed then gives the moments of a weight under another's name to the checkpoint",
    "compute_grad_norm": "hyperparameters.max_grad_norm sets it",
    **dict.fromkeys(("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"), _CHECKPOINTS),
    "stage3_gather_16bit_weights_on_model_save": _CHECKPOINTS,
    "stage3_gather_fp16_weights_on_model_save": _CHECKPOINTS,
}
"""The same of its `zero_optimization`."""


def _numbers(least: int) -> PlainValidator:
    """A count of numbers, also written as 5e8, as these configs have it."""

    def check(value: object) -> object:
        count = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= MAX_NUMBERS:
            raise wrong(f"{show(value)} is not a whole number of at least {least}")
        return count

    return PlainValidator(check, json_schema_input_type=float)


def _operations(value: object) -> object:
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise wrong(f"{show(value)} is not a list of operations")


Yes = Annotated[bool | None, PlainValidator(true_or_false, json_schema_input_type=bool)]


def _refuse(given: Any, ours: dict[str, str]) -> Any:
    for name in sorted(given) if isinstance(given, dict) else ():
        if name in ours:
            raise at(name, f"not to be given here: {ours[name]}")
    return given


class ZeroOptimization(Part):
    """What is None is left to what is derived, and to DeepSpeed."""

    contiguous_gradients: Yes = None
    reduce_scatter: Yes = None
    overlap_comm: Yes = None
    reduce_bucket_size: Annotated[int | None, _numbers(1)] = None
    allgather_bucket_size: Annotated[int | None, _numbers(1)] = None
    use_multi_rank_bucket_allreduce: Yes = None
    parameter_alignment: Yes = None
    sub_group_size: Annotated[int | None, _numbers(1)] = None
    stage3_prefetch_bucket_size: Annotated[int | None, _numbers(0)] = None
    stage3_param_persistence_threshold: Annotated[int | None, _numbers(0)] = None
    stage3_model_persistence_threshold: Annotated[int | None, _numbers(0)] = None
    stage3_max_live_parameters: Annotated[int | None, _numbers(0)] = None
    stage3_max_reuse_distance: Annotated[int | None, _numbers(0)] = None
    stage3_use_all_reduce_for_fetch_params: Yes = None
    stage3_allgather_sequential: Yes = None

    @model_validator(mode="before")
    @classmethod
    def _not_ours(cls, given: Any) -> Any:
        return _refuse(given, OURS_OF_ZERO)


class CommsLogger(Part):
    enabled: Yes = None
    verbose: Yes = None
    "Each exchange in a line of log.txt."
    prof_all: Yes = None
    prof_ops: Annotated[tuple[str, ...] | None, BeforeValidator(_operations, json_schema_input_type=list[str])] = None
    "Where it is not all: of which operations, such as all_reduce."
    debug: Yes = None


class DeepSpeed(Part):
    """What of a DeepSpeed config may be given; its names are DeepSpeed's."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    wall_clock_breakdown: Yes = None
    "How long the parts of a step take, in log.txt."
    dump_state: Yes = None
    comms_logger: CommsLogger = CommsLogger()

    @model_validator(mode="before")
    @classmethod
    def _not_ours(cls, given: Any) -> Any:
        return _refuse(given, OURS)

    def as_config(self) -> dict[str, Any]:
        """What was given, as DeepSpeed reads it."""
        given = self.model_dump(mode="json", exclude_unset=True)
        if not self.comms_logger.enabled:
            given.pop("comms_logger", None)  # which DeepSpeed takes for a wish as soon as it is there
        is_told = self.wall_clock_breakdown or self.dump_state or self.comms_logger.enabled
        return {**given, "log_level": "info"} if is_told else given


OF_STAGE_3 = {name for name in ZeroOptimization.model_fields if name.startswith("stage3_")} | {"sub_group_size"}
OF_STAGES_1_AND_2 = {*("allgather_bucket_size", "use_multi_rank_bucket_allreduce", "parameter_alignment")}
"""Keys of `zero_optimization` that the other stages do not read."""


def find_idle(config: DeepSpeed, strategy: Strategy) -> PydanticCustomError | None:
    """What of a config would do nothing with this strategy."""
    if not strategy.startswith("zero"):
        message = f'belongs to "zero1", "zero2" and "zero3", and the strategy is "{strategy}"; leave it out'
        return at("deepspeed", message)
    foreign, owner = (OF_STAGES_1_AND_2, '"zero1" and "zero2"') if strategy == "zero3" else (OF_STAGE_3, '"zero3"')
    if config.comms_logger.enabled and not config.comms_logger.verbose:
        return at("deepspeed.comms_logger.verbose", "set it to true; nothing is written otherwise")
    for name in sorted(config.zero_optimization.model_fields_set & foreign):
        return at(f"deepspeed.zero_optimization.{name}", f'belongs to {owner}; leave it out with "{strategy}"')
    return None
