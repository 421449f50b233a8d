"""Base models by name, from the operator's map. A path never comes from a client."""

import difflib
import json
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from store.errors import InvalidRequestError, NotFoundError
from store.settings import get_settings
from training.errors import BurnishError, Fault

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
HUB_ID = re.compile(rf"(?!.*(?:\.\.|--)){_PART}/{_PART}")
"""`org/name` as the hub allows it: no `.` or `..` for a part, no third part, nothing that a path could begin with."""

_ENTRY = 'a folder, a .gguf file, a hub id "org/name", or an object {"path" or "hub", "revision"}'
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ModelMapError(BurnishError):
    """The file of BURNISH_MODELS is missing or wrong, which its operator has to mend."""

    code = "invalid_model_map"
    fault: Fault = "infrastructure"


@dataclass(frozen=True)
class BaseModel:
    """`source` is an absolute path of this host (a folder or a GGUF file), or a hub id, which may have a `revision`."""

    name: str
    source: str
    revision: str | None = None
    created_at: int = 0
    "When the map was last written, in seconds."

    @property
    def reference(self) -> str:
        """What a run takes as its model: the path, or the hub id with its revision behind an @."""
        return f"{self.source}@{self.revision}" if self.revision else self.source


def list_models() -> list[BaseModel]:
    """The models of the map, by name.

    Raises:
        ModelMapError: the map cannot be read.
    """
    path = get_settings().models
    if path is None:
        return []
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelMapError(f"BURNISH_MODELS: {path} is {'a folder' if path.is_dir() else 'a device'}, not a file")
        return list(_load_map(path.resolve(), found.st_mtime_ns, found.st_size))
    except OSError as bad:
        raise ModelMapError(f"BURNISH_MODELS: {path}: {bad.strerror}") from bad


def get_model(name: str) -> BaseModel:
    """A model of the map.

    Raises:
        NotFoundError: it is not there.
    """
    for model in list_models():
        if model.name == name:
            return model
    raise NotFoundError(f"no model {name[:200]!r}", param="model", code="model_not_found")


def find_model(name: str) -> BaseModel:
    """What a job's `model` stands for on this host: an entry of the map, or a hub id where the operator allows these.

    Raises:
        InvalidRequestError: unknown, with the names that are near.
    """
    models = {model.name: model for model in list_models()}
    if name in models:
        return models[name]
    if name.startswith("ft:"):
        message = (
            "model: training on top of a fine-tuned model is not offered yet; to go on with its weights, name its base "
            "model here and the fine-tuned one in resume_from"
        )
        raise InvalidRequestError(message, param="model", code="not_offered")
    if get_settings().allow_hub and HUB_ID.fullmatch(name):
        return BaseModel(name, name)
    raise InvalidRequestError(_unknown(name, sorted(models)), param="model", code="model_not_found")


def _unknown(name: str, known: list[str]) -> str:
    message = f"model: no model {name[:200]!r}"
    if near := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"{message}; did you mean {' or '.join(near)}?"
    if known:
        return f"{message}; there are {', '.join(known[:10])}{' and more' if len(known) > 10 else ''}: GET /v1/models"
    return f"{message}; the operator of this service has named none yet (BURNISH_MODELS)"


@lru_cache(maxsize=1)
def _load_map(path: Path, mtime_ns: int, size_bytes: int) -> tuple[BaseModel, ...]:  # noqa: ARG001 - size is for the cache
    try:
        text = path.read_text("utf-8")
        entries: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except UnicodeDecodeError as bad:
        raise ModelMapError(f"BURNISH_MODELS: {path} is not UTF-8 at byte {bad.start + 1}; save it as UTF-8") from None
    except RecursionError:
        raise ModelMapError(f"BURNISH_MODELS: {path}: lists or objects far too deep within each other") from None
    except (ValueError, yaml.YAMLError) as bad:
        raise ModelMapError(f"BURNISH_MODELS: {path} cannot be read: {bad}") from None
    if not isinstance(entries, dict):
        raise ModelMapError(f"BURNISH_MODELS: {path} has to hold names and their models: name -> {_ENTRY}")
    try:
        found = [_make_model(name, entry, path.parent, mtime_ns // 10**9) for name, entry in entries.items()]
    except (ValueError, RuntimeError) as bad:  # RuntimeError: the home of nobody, or an entry too deep to be shown.
        raise ModelMapError(f"BURNISH_MODELS: {path}: {bad}") from None
    return tuple(sorted(found, key=lambda model: model.name))


def _make_model(name: object, entry: object, folder: Path, created_at: int) -> BaseModel:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or name.startswith("ft:"):
        raise ValueError(f"{name!r} is no name for a model: text that does not begin with ft: is needed")
    if isinstance(entry, str) and entry:
        is_hub = HUB_ID.fullmatch(entry) and not entry.endswith(".gguf") and not (folder / entry).exists()
        entry = {"hub": entry} if is_hub else {"path": entry}
    match entry:
        case {"path": str(path), **rest} if path and not rest:
            return BaseModel(name, str((folder / Path(path).expanduser()).resolve()), None, created_at)
        case {"hub": str(hub), **rest} if HUB_ID.fullmatch(hub) and set(rest) <= {"revision"}:
            revision = rest.get("revision")
            if revision is not None and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
                raise ValueError(f"{name}: revision {revision!r} is not a branch, tag or commit as text")
            return BaseModel(name, hub, revision, created_at)
    raise ValueError(f"{name}: {entry!r} is not {_ENTRY} (a revision is for the hub only)")
