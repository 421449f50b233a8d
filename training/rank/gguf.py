"""GGUF files as model folders: dequantised once into a cache, because reading one takes transformers many seconds."""

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from training.errors import ModelError
from training.rank.lock import lock
from training.rundir import MANIFEST, commit_folder, file_sha256


def get_converted(file: Path, sha256: str) -> Path:
    """The cached folder (safetensors in fp32, config, tokenizer) of a GGUF file; converted if it is not there yet.

    Raises:
        ModelError: the file is no GGUF, or of a kind that transformers cannot read.
    """
    cache = model_cache()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / _key(sha256)
    with lock(cache / f"{target.name}.lock"):
        if not (target / MANIFEST).exists():
            _convert(file, target)
    return target


def model_cache() -> Path:
    asked = os.environ.get("BURNISH_MODEL_CACHE")
    return Path(asked) if asked else Path.home() / ".cache" / "burnish" / "models"


def file_digest(file: Path) -> str:
    """The sha256 of a GGUF file; its magic is looked at first, since a wrong file may be huge."""
    with file.open("rb") as start:
        magic = start.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{file.name}: not a GGUF file (it begins with {magic!r}); fetch it again")
    return file_sha256(file)


def _key(sha256: str) -> str:
    versions = [f"{name}-{importlib.metadata.version(name)}" for name in ("transformers", "gguf")]
    return "-".join([sha256[:32], *versions])


def _convert(file: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}")
    shutil.rmtree(beside, ignore_errors=True)
    model, tokenizer = _read(file)
    # What transformers notes of the GGUF would make it take the dequantised copy for a quantised model.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    commit_folder(beside, target, {"source": file.name})


def _read(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    about: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **about)
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **about
        )
    except Exception as error:  # transformers and gguf raise whatever their parsers trip over
        raise ModelError(
            f"{file.name}: this GGUF cannot be read ({error}); use the model's safetensors folder"
        ) from error
    # transformers would make up what is not there and go on.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{file.name}: it lacks {', '.join(missing[:3])}; fetch it again")
    return model, tokenizer
