"""The trained weights that a job starts from in the place of the base model's: those of an earlier job."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import nn

from training.errors import SpecError
from training.rank.model import load_config, load_model
from training.rank.source import WEIGHTS, Source
from training.rank.weights import ADAPTER_WEIGHTS, BASE_DIGEST, load_adapter, make_adapter_config
from training.rundir import MANIFEST, file_sha256, read_json, verify
from training.spec import JobSpec

PARAM = "resume_from"
OUR_NAMES = {"lora_alpha": "alpha", "target_parameters": "target_modules"}
UNLIKE_BY_NATURE = {
    *("base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "init_lora_weights", "peft_version"),
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "init_ia3_weights"),
}
"""Keys of configs that do not decide which weights fit."""


@dataclass(frozen=True)
class Start:
    kind: Literal["adapter", "model"]
    folder: Path
    digest: str
    "Of the weights: a run that starts from others is another run."


def find_start(spec: JobSpec, source: Source) -> Start | None:
    """What `resume_from` names: the folder of a checkpoint, of an adapter or of a model; None where it names nothing.

    Raises:
        SpecError: there are no such weights, they are damaged, or they are of another base model or kind.
    """
    if spec.resume_from is None:
        return None
    path = Path(spec.resume_from).expanduser()
    kind, folder = _find_weights(path)
    if kind != ("model" if spec.adapter.type == "full" else "adapter"):
        made = "all weights of a model" if kind == "model" else "an adapter"
        raise _wrong(f"{path} holds {made}, which adapter.type {spec.adapter.type} does not go on from")
    for manifested in (path, folder):
        if (manifested / MANIFEST).exists() and (fault := verify(manifested)):
            raise _wrong(f"{path} is damaged: {fault}")
    if kind == "adapter":
        _require_adapter_of(source, folder)
    else:
        _require_like("a model of another make", read_config(source, folder), read_config(source, source.folder))
    sums = "".join(file_sha256(file) for file in sorted(folder.glob(WEIGHTS)))
    return Start(kind, folder, hashlib.sha256(sums.encode()).hexdigest())


def load_start(start: Start, model: nn.Module, source: Source) -> None:
    """Put the weights into a model that was just made; its optimizer is new.

    Raises:
        SpecError: the adapter was made otherwise than the job asks, with the field.
    """
    if start.kind == "model":
        load_model(model, source, start.folder)
        return
    _require_like(
        "an adapter made otherwise", read_json(start.folder / "adapter_config.json"), make_adapter_config(model)
    )
    load_adapter(model, start.folder)


def read_config(source: Source, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = load_config(replace(source, folder=folder, name=str(folder))).to_dict()
    return config


def _find_weights(path: Path) -> tuple[Literal["adapter", "model"], Path]:
    for folder in (path, path / "adapter", path / "model"):
        if (folder / "adapter_config.json").is_file() and (folder / ADAPTER_WEIGHTS).is_file():
            return "adapter", folder
        if (folder / "config.json").is_file() and any(folder.glob(WEIGHTS)):
            return "model", folder
    raise _wrong(f"{path} holds no trained weights; the folder of a checkpoint, an adapter or a model is expected")


def _require_adapter_of(source: Source, folder: Path) -> None:
    """By the digest that stands in our own; an adapter made elsewhere has only the name of its base."""
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        digest = (file.metadata() or {}).get(BASE_DIGEST)
    named = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if (digest is not None and digest != source.digest) or (digest is None and named not in (None, source.name)):
        raise _wrong(f"the adapter was trained on another base model ({named}) than {source.name}; name that one")


def _require_like(what: str, made: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in sorted((made.keys() & wanted.keys()) - UNLIKE_BY_NATURE):
        if made[name] != wanted[name]:
            field = f"adapter.{OUR_NAMES.get(name, name)}" if "peft_type" in made else name
            raise _wrong(f"{what}: its {field} is {made[name]}, here it is {wanted[name]}")


def _wrong(message: str) -> SpecError:
    return SpecError(f"{PARAM}: {message}", param=PARAM, code="start_does_not_fit")
