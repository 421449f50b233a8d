"""What a run makes, as folders that peft and transformers load by themselves: `adapter/` or `model/`."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.errors import TrainingError
from training.rank.model import get_base, read_model
from training.rank.pissa import as_plain_lora, is_pissa, trained_part
from training.rank.source import Source
from training.rundir import write_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
TRAINED = "default"
"""The name that peft gives to the adapter that a model is made with."""

BASE_DIGEST = "base_digest"
"""In the metadata of an adapter's weights: the base model that they belong to."""


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def weights_name(model: nn.Module) -> str:
    return "adapter" if is_adapted(model) else "model"


def save_weights(model: nn.Module, weights: dict[str, Tensor], tokenizer: Any, source: Source, folder: Path) -> None:
    """Write the trained weights in their type, with config, tokenizer and chat template beside them. `weights` are
    whole, by their names in the model, which itself may hold a part of them.

    Raises:
        TrainingError: a weight is not finite; nothing is written.
    """
    _require_finite(model, weights)
    folder.mkdir(parents=True)
    if is_adapted(model):
        _save_adapter(model, weights, source, folder)
    else:
        _save_model(model, weights, source, folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors lets only the owner read


def load_adapter(model: nn.Module, folder: Path, name: str = TRAINED) -> None:
    """Put the adapter of a checkpoint into a model that was made for it, where its adapter `name` has to be at work.

    Raises:
        TrainingError: weights are missing, or there are others.
    """
    from peft import set_peft_model_state_dict

    saved = load_file(folder / ADAPTER_WEIGHTS)
    if model.peft_config[name].is_prompt_learning:
        set_peft_model_state_dict(model, saved, name)  # one tensor, whose shape it checks
        return
    report = set_peft_model_state_dict(model, trained_part(model, saved) if is_pissa(model) else saved, name)
    trained = {place for place, weight in model.named_parameters() if weight.requires_grad}
    missing = sorted(trained.intersection(report.missing_keys))
    if missing or report.unexpected_keys:
        raise TrainingError(f"{folder}: the adapter does not fit the model: {(missing or report.unexpected_keys)[:3]}")


def read_weights(model: nn.Module, source: Source, folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint of this model, whole, by the names of its own weights."""
    from peft import get_peft_model_state_dict

    if not is_adapted(model):
        return read_model(model, source, folder)
    saved = load_file(folder / ADAPTER_WEIGHTS)
    own = {name: weight for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad}
    if model.peft_config[TRAINED].is_prompt_learning:
        return dict(zip(own, saved.values(), strict=True))  # one tensor
    saved = trained_part(model, saved) if is_pissa(model) else saved
    # peft renames the weights that it is given, and so tells which name in the file is whose.
    names = {weight: name for name, weight in own.items()}
    renamed = get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    return {names[weight]: saved[name] for name, weight in renamed.items()}


def make_adapter_config(model: nn.Module) -> dict[str, Any]:
    config = {**model.peft_config[TRAINED].to_dict(), "inference_mode": True}
    # Sets have no order of their own: the same run is to give the same bytes.
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}


def _save_adapter(model: nn.Module, weights: dict[str, Tensor], source: Source, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    config = make_adapter_config(model)
    if is_pissa(model):
        state, config = as_plain_lora(model, state, config)
    # Copies: tied weights stand under both their names.
    state = {name: weight.detach().cpu().clone(memory_format=torch.contiguous_format) for name, weight in state.items()}
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", BASE_DIGEST: source.digest})
    _sort_metadata(folder / ADAPTER_WEIGHTS)
    write_json(folder / "adapter_config.json", config)


def _sort_metadata(file: Path) -> None:
    """safetensors writes the keys of the metadata in an order that changes from call to call: the same run is to give
    the same bytes."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(ordered) != size:
            raise TrainingError(f"{file}: its header, put in order, takes {len(ordered)} bytes and not {size}")
        opened.seek(8)
        opened.write(ordered)


def _save_model(model: nn.Module, weights: dict[str, Tensor], source: Source, folder: Path) -> None:
    from transformers import GenerationConfig

    # Many published generation configs contradict themselves, which transformers reads but does not write: theirs is
    # copied as it is.
    published, own = source.folder / "generation_config.json", model.generation_config
    model.generation_config = GenerationConfig() if published.exists() else own
    try:
        get_base(model).save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = own
    if published.exists():
        shutil.copyfile(published, folder / published.name)


def _require_finite(model: nn.Module, weights: dict[str, Tensor]) -> None:
    # What another rank trains has a shape here, and no memory.
    trained = [
        (name, weights[name])
        for name, weight in model.named_parameters()
        if name in weights and (weight.requires_grad or weight.is_meta)
    ]
    bad = [name for name, weight in trained if not torch.isfinite(weight).all()]
    if bad:
        raise TrainingError(
            f"{len(bad)} of {len(trained)} trained weights are not finite, such as {bad[0]}; lower the learning_rate",
            code="non_finite_weights",
        )
