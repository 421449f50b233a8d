"""How much memory a run takes on its device, told before it runs."""

import math

from training.adapter import Adapter
from training.devices import SHARDS_STATES, SHARDS_WEIGHTS, Layout, Offload, Strategy, count_stages, share_layers
from training.facts import DataFacts, Fact, ModelFacts
from training.spec import JobSpec, NextTokenHyperparameters

MASK_BYTES = 8
"""For each pair of places of a pass with several rows: what is made on the way to their lengths."""
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""Of fp32 logits, by device: as many as are made at once, enough to keep a device busy."""


class Memory(Fact):
    """A forecast of the device's memory by part, in bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    host_bytes: int = 0
    "What waits in the host's memory beside a GPU's, of each rank; not among the others."

    @property
    def total_bytes(self) -> int:
        """On the device."""
        states_bytes = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states_bytes + self.activations_bytes + self.logits_bytes


def forecast_memory(
    spec: JobSpec,
    precision: str,
    model: ModelFacts,
    data: DataFacts,
    max_seq_len: int,
    micro_batch_size: int,
    gradient_checkpointing: bool,
    activation_offloading: bool = False,
    shared: tuple[int, int] | None = None,
    device: str = "cpu",
    passes_per_step: int = 1,
) -> Memory:
    """Bytes by part on each device.

    With context parallelism a rank has its piece of a pass, whose trained tokens may all be in it.
    Model states as in ZeRO (Rajbhandari et al. 2020, section 3.1): what is trained is kept in fp32 with its gradient
    and Adam's two moments (4 + 4 + 8 bytes); frozen weights in the compute type. Activations are counted as Korthikanti
    et al. (2022, section 4.1) do, for today's layers (gated, without dropout, attention matrix never stored): what the
    backward pass needs of a token in a layer is 12 x hidden (norms, projections, attention) and 4 x intermediate (the
    gated MLP) numbers; with checkpointing one input a layer and one whole layer; offloaded, the one layer that is
    computed. Eager attention keeps of each head the scores, their softmax in fp32 and that in the compute type, over
    all tokens of the pass. One quantised layer at a time is unpacked. Of adapted experts in stacks the sum of weight
    and adapter is kept, and a layer's gradient. An adapter that a preference method compares with is kept in fp32
    beside the trained one. What ranks keep a part of is in `share_states`; weights that are gathered for a moment count
    as activations: embeddings and head, and two layers, the one that is computed and the next. What is offloaded counts
    on the host where the device is a GPU, and on a CPU as if it were not. Of matrices that are split
    (`parallelism.tensor`) a rank has its part, and of activations that of its heads and its part of the MLP: 4 of the
    12 are whole on each (Korthikanti et al., section 4.2.1), and so are adapters but for next to nothing. In a
    pipeline it is the rank that has most: see `_share_of_stage` and `_count_under_way`.

    A pass has `micro_batch_size` of the longest rows, or of shorter ones as many rows and tokens as `shared` says. Of
    split experts a rank keeps its share, and as many tokens are taken to come to it as it sends.
    """
    model = _share_experts(model, spec.layout.expert)
    width = 4 if precision == "fp32" else 2
    model = _split(model, spec)
    # The loss of a pair needs both of its sides at once.
    passes = 2 if spec.method.type == "dpo" else 1
    pass_tokens = micro_batch_size * min(data.longest_tokens, max_seq_len)
    rows, tokens = shared or (micro_batch_size, pass_tokens)
    pass_tokens = math.ceil(pass_tokens / spec.layout.context)
    trained_tokens = max(
        micro_batch_size * data.longest_trained_tokens, min(tokens, rows * data.longest_trained_tokens)
    )
    mask_numbers = tokens**2 if _needs_mask(spec, rows) else 0
    unpacked_bytes = width * model.hidden_size * model.intermediate_size if model.quantised_parameters else 0
    kept_bytes = _kept_bytes(spec, width, model, passes, pass_tokens, gradient_checkpointing, activation_offloading)
    weights_bytes = _weights_bytes(spec, width, model)
    layout, trained = spec.layout, model.trained_parameters
    strategy, ranks = layout.strategy, layout.copies
    handed_bytes = 0
    if layout.pipeline > 1:
        share = _share_of_stage(layout, model)
        weights_bytes, trained = math.ceil(weights_bytes * share), math.ceil(trained * share)
        kept_bytes = math.ceil(kept_bytes * _count_under_way(layout, passes_per_step) * _share_of_layers(layout, model))
        # Of each pass of a step, in fp32 where weights are: what is received, and its gradient.
        handed_bytes = (
            2 * passes_per_step * pass_tokens * model.hidden_size * (4 if spec.adapter.type == "full" else width)
        )
    gathered_bytes = _gathered_bytes(model, weights_bytes) if strategy in SHARDS_WEIGHTS else 0
    copies = _count_copies(strategy, spec.parallelism.offload) if spec.layout.tensor == 1 else 0  # DeepSpeed's
    copies_bytes = model.trained_parameters * 4 * copies
    scales_bytes = _scales_bytes(spec, model) if strategy in SHARDS_WEIGHTS else 0
    of_weights, of_gradients, of_optimizer = share_states(
        strategy,
        ranks,
        weights_bytes - scales_bytes,
        trained * 4,
        _optimizer_bytes(spec, model, trained) + copies_bytes,
    )
    on_host = _list_offloaded(strategy, spec.parallelism.offload) if device == "cuda" else set()
    parts = {"weights": of_weights, "gradients": of_gradients, "optimizer": of_optimizer}
    on_device = {name: 0 if name in on_host else size for name, size in parts.items()}
    return Memory(
        weights_bytes=on_device["weights"] + scales_bytes,
        gradients_bytes=on_device["gradients"],
        optimizer_bytes=on_device["optimizer"],
        host_bytes=sum(parts[name] for name in on_host),
        activations_bytes=kept_bytes + MASK_BYTES * mask_numbers + unpacked_bytes + gathered_bytes + handed_bytes,
        logits_bytes=_logits_bytes(passes * trained_tokens, model),
    )


def _split(model: ModelFacts, spec: JobSpec) -> ModelFacts:
    """As one of the ranks that matrices are split among has it."""
    ranks = spec.layout.tensor
    if ranks == 1:
        return model
    parameters = model.whole_parameters + math.ceil((model.parameters - model.whole_parameters) / ranks)
    mine = {
        "parameters": parameters,
        "trained_parameters": parameters if spec.adapter.type == "full" else model.trained_parameters,
        "intermediate_size": math.ceil(model.intermediate_size / ranks),
        "vocabulary": math.ceil(model.vocabulary / ranks),
        "attention_heads": math.ceil(model.attention_heads / ranks),
    }
    return model.model_copy(update=mine)


def _share_experts(model: ModelFacts, ranks: int) -> ModelFacts:
    """What a rank keeps of a model whose experts are split among so many."""
    others, of_trained = (
        count - math.ceil(count / ranks) for count in (model.expert_parameters, model.trained_expert_parameters)
    )
    return model.model_copy(
        update={
            "parameters": model.parameters - others,
            "trained_parameters": model.trained_parameters - of_trained,
            "stacked_parameters": math.ceil(model.stacked_parameters / ranks),
        }
    )


def _weights_bytes(spec: JobSpec, width: int, model: ModelFacts) -> int:
    """Of frozen weights in the compute type or quantised, and of trained ones, on one device."""
    frozen = model.parameters - model.trained_parameters if spec.adapter.type == "full" else model.parameters
    quantised_bytes = math.ceil(model.quantised_parameters * bits_per_weight(spec.adapter) / 8)
    adapters = 2 if spec.has_reference and spec.resume_from is not None else 1
    return (frozen - model.quantised_parameters) * width + quantised_bytes + model.trained_parameters * 4 * adapters


def _kept_bytes(
    spec: JobSpec,
    width: int,
    model: ModelFacts,
    passes: int,
    pass_tokens: int,
    gradient_checkpointing: bool,
    activation_offloading: bool,
) -> int:
    """What the layers keep for the backward pass."""
    input_bytes = width * passes * pass_tokens * model.hidden_size
    layer_bytes = (
        4 * input_bytes
        + math.ceil(8 * input_bytes / spec.layout.tensor)
        + 4 * width * passes * pass_tokens * model.intermediate_size
    )
    if spec.attention == "eager" or not model.has_fused_attention:
        layer_bytes += (4 + 2 * width) * passes * model.attention_heads * pass_tokens**2
    stacked_bytes = width * model.stacked_parameters // model.layers
    layer_bytes += stacked_bytes
    kept = model.layers * (input_bytes if gradient_checkpointing else layer_bytes)
    if activation_offloading:
        kept = input_bytes
    if activation_offloading or gradient_checkpointing:
        kept += layer_bytes
    return kept + stacked_bytes


def share_states(
    strategy: Strategy, ranks: int, weights_bytes: int, gradients_bytes: int, optimizer_bytes: int
) -> tuple[int, int, int]:
    """What a rank keeps of each (ZeRO, Rajbhandari et al. 2020, figure 1): stage 1 shares what the optimizer has, stage
    2 the gradients too, stage 3 the weights too, as full sharding does."""
    of_weights = ranks if strategy in SHARDS_WEIGHTS else 1
    of_gradients = ranks if strategy in SHARDS_WEIGHTS or strategy == "zero2" else 1
    of_optimizer = ranks if strategy in SHARDS_STATES else 1
    return (
        math.ceil(weights_bytes / of_weights),
        math.ceil(gradients_bytes / of_gradients),
        math.ceil(optimizer_bytes / of_optimizer),
    )


def _share_of_layers(layout: Layout, model: ModelFacts) -> float:
    """Of the layers, what the first rank of a pipeline has: as many as any other, or more."""
    layers_of = share_layers(model.layers, count_stages(layout.pipeline, layout.schedule))
    return sum(layers_of[:: layout.pipeline]) / model.layers


def _share_of_stage(layout: Layout, model: ModelFacts) -> float:
    """Of the weights: its layers, and the embeddings or as large a head. What is trained is shared as they are."""
    ends = min(1.0, model.vocabulary * model.hidden_size / model.parameters)
    return ends + (1 - ends) * _share_of_layers(layout, model)


def _count_under_way(layout: Layout, passes_per_step: int) -> float:
    """Passes whose activations the first rank keeps for its layers at once: one for each rank; interleaved, up to three
    halves of that (Narayanan et al. 2021, section 2.2)."""
    most = 1.5 * layout.pipeline if layout.schedule == "interleaved" else layout.pipeline
    return min(most, passes_per_step)


def _count_copies(strategy: Strategy, offload: Offload) -> int:
    """Of what is trained, in fp32, beside weights, gradients and moments: DeepSpeed steps a copy of the weights, also
    where they are fp32 themselves. On the host it sums gradients beside those that it steps, below stage 3 the new
    weights lie there once more before they go back, and in stage 1 all of it is beside the device's gradients."""
    if not strategy.startswith("zero"):
        return 0
    return 1 if offload == "none" else {"zero1": 4, "zero2": 3}.get(strategy, 2)


def _list_offloaded(strategy: Strategy, offload: Offload) -> set[str]:
    """Which of the states are kept on the host. Gradients of stage 1 are whole on the device until they are summed."""
    if offload == "none":
        return set()
    kept = {"optimizer"} if strategy == "zero1" else {"optimizer", "gradients"}
    return kept | {"weights"} if offload == "params" else kept


def _scales_bytes(spec: JobSpec, model: ModelFacts) -> int:
    """Those of quantised weights, which are not split with them."""
    return math.ceil(model.quantised_parameters * (bits_per_weight(spec.adapter) - spec.adapter.bits) / 8)


def _gathered_bytes(model: ModelFacts, weights_bytes: int) -> int:
    ends = min(1.0, 2 * model.vocabulary * model.hidden_size / model.parameters)
    return math.ceil(weights_bytes * (ends + (1 - ends) * min(1.0, 2 / model.layers)))


def _logits_bytes(trained_tokens: int, model: ModelFacts) -> int:
    """The head runs on labelled positions only, and where it can on some at a time: logits, a copy in the compute type
    and their gradient, in fp32."""
    logits_bytes = 4 * trained_tokens * model.vocabulary
    return 3 * (min(logits_bytes, max(CHUNK_BYTES.values())) if model.head_in_parts else logits_bytes)


def _needs_mask(spec: JobSpec, rows_per_pass: int) -> bool:
    """Whether rows that share a pass are told by a mask, once a pass."""
    packed = isinstance(spec.hyper, NextTokenHyperparameters) and spec.hyper.packing is True
    return spec.attention != "flash" and spec.layout.context == 1 and (packed or rows_per_pass > 1)


def bits_per_weight(adapter: Adapter) -> float:
    """What bitsandbytes keeps of a quantised weight: 4 bits and a scale for each 64 weights, in fp32, or in 8 bits with
    an fp32 scale for each 256 of them (QLoRA, section 3); or 8 bits and a scale for each row, next to nothing."""
    if adapter.bits == 8:
        return 8.0
    return 4 + (8 / 64 + 32 / (64 * 256) if adapter.double_quant else 32 / 64)


def _optimizer_bytes(spec: JobSpec, model: ModelFacts, trained_parameters: int) -> int:
    """Adam's two moments, in fp32 or in 8 bits with an fp32 scale for each 256; Adafactor's rows and columns of the
    second moment, where the narrow side of an adapter's matrix is its rank."""
    match spec.hyper.optimizer:
        case "adamw":
            return trained_parameters * 8
        case "adafactor":
            narrow = spec.adapter.r if spec.adapter.is_low_rank else model.hidden_size
            return math.ceil(trained_parameters * 4 / narrow)
        case _:
            return math.ceil(trained_parameters * 2 * (1 + 4 / 256))
