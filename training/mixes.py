"""What does not go together on several devices, told before anything starts, with what does: by the spec alone, and by
what the plan knows of the model."""

from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from training.adapter import Adapter
from training.deepspeed_config import DeepSpeed, find_idle
from training.devices import SHARDS_STATES, SHARDS_WEIGHTS, Layout, Offload, count_stages
from training.errors import SpecError
from training.facts import ModelFacts
from training.fields import at


@dataclass(frozen=True)
class Mix:
    """Of a spec what may be at odds with its layout."""

    layout: Layout
    method: str
    adapter: Adapter
    optimizer: str
    attention: str
    activation_offloading: bool
    offload: Offload
    deepspeed: DeepSpeed | None


def find_conflict(asked: Mix) -> PydanticCustomError | None:
    """The first that cannot run, with what can."""
    found = (check(asked) for check in (_offload, _expert, _tensor, _pipeline, _context, _copies, _shards, _deepspeed))
    return next((conflict for conflict in found if conflict is not None), None)


def require_fit(layout: Layout, model: ModelFacts, attention: str) -> None:
    """Raises SpecError for a model that cannot be trained in this layout."""
    _require_gatherable(layout, model)
    _require_units(layout, model)
    _require_experts(layout, model)
    _require_heads(layout, model, attention)
    _require_layers(layout, model)


def _offload(asked: Mix) -> PydanticCustomError | None:
    layout, strategy = asked.layout, asked.layout.strategy
    if asked.offload == "optimizer" and not strategy.startswith("zero"):
        how = '; "params" moves all of it' if strategy == "fsdp" else "; leave it out"
        message = f'"optimizer" goes with "zero1", "zero2" and "zero3", and the strategy is "{strategy}"{how}'
        return at("parallelism.offload", message)
    if asked.offload == "params" and strategy not in SHARDS_WEIGHTS:
        how = '; "optimizer" moves what is split' if strategy in SHARDS_STATES else "; leave it out"
        message = f'"params" goes with "fsdp" and "zero3", and the strategy is "{strategy}"{how}'
        return at("parallelism.offload", message)
    if asked.offload != "none" and layout.tensor > 1:
        return at("parallelism.offload", "what parallelism.tensor has split stays on its device; leave one of them out")
    return None


def _expert(asked: Mix) -> PydanticCustomError | None:
    layout, adapter = asked.layout, asked.adapter
    expert, param = layout.expert, "parallelism.expert"
    if expert == 1:
        return None
    others = [name for name in ("tensor", "pipeline", "context") if getattr(layout, name) > 1]
    if others:
        return at(param, f"experts are split among data-parallel ranks alone; leave {others[0]} at 1, or this")
    if layout.data % expert:
        message = f"experts are split among data-parallel ranks, and {expert} does not divide the {layout.data} of them"
        return at(param, f"{message}; make parallelism.data a multiple of it, or leave it at 1")
    if layout.strategy != "ddp":
        return at(param, f'"{layout.strategy}" does not split experts; "ddp" does, or leave it at 1')
    if adapter.type == "qlora":
        return at(param, 'quantised models are loaded onto each device whole; "lora" is trained, or leave it at 1')
    if asked.optimizer != "adamw":
        return at(param, f'the moments of {asked.optimizer} are not split; take "adamw", or leave it at 1')
    if asked.activation_offloading:
        return at("activation_offloading", "not together with parallelism.expert; leave one of them out")
    return None


def _tensor(asked: Mix) -> PydanticCustomError | None:
    layout, adapter = asked.layout, asked.adapter
    strategy, param = layout.strategy, "parallelism.tensor"
    if layout.tensor == 1:
        return None
    others = [name for name in ("pipeline", "context") if getattr(layout, name) > 1]
    if others:
        return at(param, f"it does not go together with {others[0]}; leave that at 1, or this")
    if strategy not in ("none", "ddp", "zero1"):
        message = f'"{strategy}" does not go together with parallelism.tensor; "ddp" and "zero1" do'
        return at("parallelism.strategy", message)
    if adapter.type not in ("full", "lora", "prompt"):
        message = f'{adapter.type} is not trained on split matrices; it is by strategy "ddp", with tensor left out'
        return at(param, message)
    if adapter.use_dora:
        return at(param, 'DoRA is not trained on split matrices; it is by strategy "fsdp", with tensor left out')
    if asked.optimizer != "adamw":
        message = (
            f'{asked.optimizer} does not step parts of weights; take "adamw", or strategy "ddp" with tensor left out'
        )
        return at(param, message)
    if asked.activation_offloading:
        return at("activation_offloading", "not together with parallelism.tensor; leave it out, or take tensor 1")
    if asked.deepspeed is not None:
        return at("deepspeed", "DeepSpeed does not step what parallelism.tensor has split; leave it out")
    return None


def _pipeline(asked: Mix) -> PydanticCustomError | None:
    layout, adapter = asked.layout, asked.adapter
    if layout.pipeline == 1:
        return None
    if layout.strategy in SHARDS_STATES:
        return at("parallelism.strategy", f'"{layout.strategy}" does not go with a pipeline; "ddp" does')
    for other in ("tensor", "expert", "context"):
        if getattr(layout, other) > 1:
            return at("parallelism.pipeline", f"does not go with {other}; leave one of the two at 1")
    if asked.attention == "flash":  # the whole model is tried on the host, before a rank takes its part
        return at("attention", '"flash" does not go with a pipeline; take "sdpa"')
    if asked.method in ("dpo", "kto"):
        why = f'{asked.method} compares each row with a reference in the same pass; "ddp" and "fsdp" train it'
        return at("parallelism.pipeline", f"{why}, with pipeline 1")
    if adapter.type == "qlora":
        return at("parallelism.pipeline", 'quantised weights are not split; "ddp" trains qlora, with pipeline 1')
    if adapter.virtual_tokens:
        why = f'a {adapter.type} stands before the first layer and is not handed on; "ddp" trains it, with pipeline 1'
        return at("parallelism.pipeline", why)
    if adapter.init == "pissa":
        return at("parallelism.pipeline", 'PiSSA is not split; "ddp" and "fsdp" train it, with pipeline 1')
    if adapter.modules_to_save:
        why = 'adapter.modules_to_save are not split; "ddp" and "fsdp" train them, with pipeline 1'
        return at("parallelism.pipeline", why)
    if asked.activation_offloading:
        why = "not together with a pipeline, where several passes are under way at once; leave it out"
        return at("activation_offloading", why)
    return None


def _context(asked: Mix) -> PydanticCustomError | None:
    layout, adapter = asked.layout, asked.adapter
    if layout.context > 1 and adapter.virtual_tokens:
        return at("parallelism.context", f"a {adapter.type} stands before whole rows only; leave context at 1")
    if layout.context > 1 and asked.method in ("dpo", "kto"):
        return at("parallelism.context", f"{asked.method} needs whole rows on a rank; leave it at 1")
    return None


def _copies(asked: Mix) -> PydanticCustomError | None:
    layout, strategy = asked.layout, asked.layout.strategy
    if strategy == "none" and layout.copies > 1:
        message = f'"none" is for one device, and there are {layout.copies}; set "auto" or "ddp"'
        return at("parallelism.strategy", message)
    if (strategy == "ddp" or strategy in SHARDS_STATES) and layout.copies == 1:
        how = "set resources.gpus to 2 or more, on the CPU parallelism.data, or leave the strategy out"
        if layout.ranks > 1:
            how = "set parallelism.data to 2 or more, or leave the strategy out"
        return at("parallelism.strategy", f'"{strategy}" shares rows among devices, and parallelism.data is 1; {how}')
    return None


def _shards(asked: Mix) -> PydanticCustomError | None:
    adapter, strategy = asked.adapter, asked.layout.strategy
    if strategy not in SHARDS_STATES:
        return None
    if strategy in SHARDS_WEIGHTS and adapter.type == "qlora" and adapter.bits == 8:
        message = f'"{strategy}" splits weights in 4 bits, not in 8; "zero2" and "ddp" train both'
        return at("parallelism.strategy", message)
    if adapter.virtual_tokens:
        return at("parallelism.strategy", f'"{strategy}" does not split a {adapter.type}; "ddp" trains it')
    if strategy == "zero3" and adapter.is_low_rank and (adapter.use_dora or adapter.init == "pissa"):
        kind = "DoRA" if adapter.use_dora else "PiSSA"
        message = f'"zero3" does not gather the weights that {kind} reads by itself; "zero2" and "fsdp" train it'
        return at("parallelism.strategy", message)
    if strategy == "zero3" and adapter.modules_to_save:
        message = '"zero3" does not gather adapter.modules_to_save; "zero2" and "fsdp" train them'
        return at("parallelism.strategy", message)
    if asked.optimizer != "adamw":
        message = f'"{strategy}" does not split the moments of {asked.optimizer}; take "adamw", or "ddp"'
        return at("parallelism.strategy", message)
    if asked.activation_offloading:
        message = f'not together with "{strategy}", which moves tensors by itself; leave it out, or take "ddp"'
        return at("activation_offloading", message)
    return None


def _deepspeed(asked: Mix) -> PydanticCustomError | None:
    return None if asked.deepspeed is None else find_idle(asked.deepspeed, asked.layout.strategy)


def _require_gatherable(layout: Layout, model: ModelFacts) -> None:
    """Raises SpecError for a model that the strategy would train wrongly."""
    if layout.strategy == "zero3" and model.stacked_parameters:
        param = "parallelism.strategy"
        message = f'{param}: "zero3" does not gather stacked experts for an adapter; "zero2" and "fsdp" train it'
        raise SpecError(message, param=param)


def _require_units(layout: Layout, model: ModelFacts) -> None:
    """Raises SpecError for a model whose matrices cannot be split among so many ranks."""
    if layout.tensor == 1:
        return
    param, instead = "parallelism.tensor", 'strategy "fsdp" splits the weights of any model'
    if model.tensor_units == 1:
        message = f"{param}: there is no plan for how to split the layers of {model.family}; leave it out, {instead}"
        raise SpecError(message, param=param)
    if model.stacked_parameters:
        message = f'{param}: adapters of experts in stacks are not split; "ddp" and "fsdp" train them, with tensor 1'
        raise SpecError(message, param=param)
    if model.tensor_units % layout.tensor:
        sizes = [size for size in range(2, min(model.tensor_units, 1024) + 1) if model.tensor_units % size == 0]
        listed = ", ".join(map(str, sizes))
        message = f"{param}: the heads and widths of this model are not divisible by {layout.tensor}; {listed} would do"
        raise SpecError(f"{message}, and {instead}", param=param)


def _require_experts(layout: Layout, model: ModelFacts) -> None:
    """Raises SpecError for a model whose experts cannot be split in so many parts."""
    param = "parallelism.expert"
    if layout.expert > 1 and not model.experts:
        message = f"{param}: {model.family} has no experts that can be split among ranks; leave it at 1"
        raise SpecError(message, param=param)
    if model.experts and model.experts % layout.expert:
        fitting = [parts for parts in range(2, model.experts + 1) if model.experts % parts == 0]
        what = f"{layout.expert} does not divide the {model.experts} experts of a layer"
        raise SpecError(f"{param}: {what}; {' and '.join(map(str, fitting))} do", param=param)


def _require_heads(layout: Layout, model: ModelFacts, attention: str) -> None:
    """Raises SpecError for a model whose rows cannot be computed in pieces."""
    if layout.context == 1:
        return
    param, others = "parallelism.context", "leave it at 1, and take fsdp or zero3 where memory is short"
    if attention != "sdpa" or not model.attends_to_all:
        what = f"attention of {model.family}" if attention == "sdpa" else f'attention "{attention}"'
        raise SpecError(f"{param}: {what} cannot be computed by heads that ranks exchange; {others}", param=param)
    if model.attention_heads % layout.context:
        heads = model.attention_heads
        sizes = [size for size in range(2, heads + 1) if heads % size == 0]
        fitting = f"{', '.join(map(str, sizes))} divide its {heads} heads"
        raise SpecError(
            f"{param}: {layout.context} does not divide the heads of {model.family}; {fitting}", param=param
        )


def _require_layers(layout: Layout, model: ModelFacts) -> None:
    """Raises SpecError for a model that has not a layer for each stage of a pipeline."""
    stages = count_stages(layout.pipeline, layout.schedule)
    if layout.pipeline > 1 and model.layers < stages:
        param = "parallelism.schedule" if model.layers >= layout.pipeline else "parallelism.pipeline"
        message = f"{param}: the model has {model.layers} layers, and there would be {stages} stages"
        less = 'take "1f1b"' if model.layers >= layout.pipeline else f"take {model.layers} ranks at most"
        raise SpecError(f"{message}; {less}", param=param)
