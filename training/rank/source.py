"""Where a base model comes from: a folder, a GGUF file or the hub. Nothing that could run code is let in."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import ModelError
from training.rank.gguf import file_digest, get_converted

HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?")
WEIGHTS = "*.safetensors"
TOKENIZER = ("*token*.json", "vocab.*", "merges.txt", "*.model", "chat_template*", "*.jinja", "*.tiktoken")
CODE_KEYS = ("auto_map", "trust_remote_code")
BLOCK_BYTES = 2**16


@dataclass(frozen=True)
class Source:
    """A base model on this disk. `name` is what a loader is given to find it again; `digest` tells it from others."""

    folder: Path
    name: str
    digest: str
    revision: str | None = None


def find_source(model: str, *, weights: bool = True) -> Source:
    """The folder of a base model: that folder itself, a converted GGUF file, or a snapshot of the hub (`org/name`,
    `org/name@revision`). With `weights` False the weights may be missing: enough for a plan.

    Raises:
        ModelError: there is no such model, or one that is not safe or not whole.
    """
    path = Path(model).expanduser()
    if path.is_file():
        sha256 = file_digest(path)
        folder = get_converted(path.resolve(), sha256)
        return Source(folder, str(folder), sha256)
    revision = None
    if path.is_dir():
        folder, name = path.resolve(), str(path.resolve())
    elif match := HUB_NAME.fullmatch(model):
        name, revision = match["repo"], match["revision"]
        folder = _fetch(name, revision, weights)
    else:
        raise ModelError(f"{model}: no such folder or GGUF file, and not a name of the hub (org/name)", param="model")
    _check(folder, model, weights)
    return Source(folder, name, _digest(folder), revision)


def list_tokenizer_files(folder: Path) -> list[Path]:
    """The files that decide which tokens a row becomes, the chat template among them."""
    return sorted({file for pattern in TOKENIZER for file in folder.glob(pattern)})


def _fetch(repo: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", *([WEIGHTS] if weights else [])]
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        hint = "check the name, the network, and HF_TOKEN if the model is gated"
        raise ModelError(f"{repo}: cannot be fetched from the hub ({reason}); {hint}", param="model") from error
    return Path(folder)


def _check(folder: Path, model: str, weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{model}: no config.json in it; a folder as transformers saves it is expected", param="model")
    for file in sorted(folder.glob("*.json")):
        if file.name == "config.json" or file.name.endswith("_config.json"):
            _refuse_code(file, model)
    if weights and not list(folder.glob(WEIGHTS)):
        pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(kind))
        found = f"only pickles ({', '.join(pickles[:3])}), which may run code" if pickles else "no weights"
        raise ModelError(f"{model}: {found}; convert them to safetensors", param="model")


def _refuse_code(file: Path, model: str) -> None:
    try:
        config = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{model}: {file.name} is not JSON ({error})", param="model") from None
    for key, value in _entries(config):
        if key in CODE_KEYS and value:
            message = f"{model}: {file.name} asks to run code of its own ({key})"
            raise ModelError(f"{message}; only models that transformers knows run here", param="model")
        if key == "quantization_config" and value:
            raise ModelError(f"{model}: its weights are quantised; use the unquantised model", param="model")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a JSON value, however deep."""
    if isinstance(value, dict):
        yield from value.items()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(item)


def _digest(folder: Path) -> str:
    """A digest of the config and of sixteen blocks spread over each weight file: cheap at any size, and other weights
    differ all over."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob(WEIGHTS)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for block in range(16):
                content.seek(max(0, (size - BLOCK_BYTES) * block // 15))
                digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()
