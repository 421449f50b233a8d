"""What check_gpu.py tells: a line for each check, a table of speeds, and all of it as one JSON object."""

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml
from gpu_bench import Broken, Found, Skipped

from training.hardware import Hardware
from training.rundir import write_json

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "flash-attn")
GIB = 2**30


class Report:
    """Written anew after each check, so that a host that dies on the way leaves what was seen so far."""

    def __init__(
        self, host: Mapping[str, Any], *, rehearsal: bool, only: Sequence[str] = (), path: Path | None = None
    ) -> None:
        self.only = only
        self._path = path
        self._told: dict[str, Any] = {
            "verdict": "unfinished",
            "rehearsal": rehearsal,
            "only": list(only),
            "begun": _now(),
            "ended": None,
            "host": dict(host),
            "checks": [],
            "table": [],
        }

    def selects(self, name: str) -> bool:
        """Whether a check of this name is to be made."""
        return not self.only or any(part in name for part in self.only)

    def tell(self, name: str, check: Callable[[], Found]) -> None:
        """Make a check and say how it came out."""
        try:
            found = check()
            verdict, words, numbers = "ok", found.words, found.numbers
        except Skipped as reason:
            verdict, words, numbers = "skipped", str(reason), {}
        except Broken as bad:
            verdict, words, numbers = "failed", str(bad), bad.numbers
        shown = "FAILED" if verdict == "failed" else verdict
        print(f"{shown:<7} {name:<48} {words}", flush=True)
        self._told["checks"].append({"name": name, "verdict": verdict, "words": words, "numbers": numbers})
        self._write()

    def add_row(self, row: Mapping[str, Any]) -> None:
        self._told["table"].append(dict(row))

    def end(self) -> bool:
        """Print the table, and how many checks came out how. Whether all is well; not where none was made."""
        for line in make_table(self._told["table"]):
            print(line)
        verdicts = [check["verdict"] for check in self._told["checks"]]
        well = bool(verdicts) and "failed" not in verdicts
        self._told |= {"verdict": "ok" if well else "failed", "ended": _now()}
        self._write()
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "skipped", "failed"))
        print(counts if verdicts else "nothing was checked: no name of a check has that part")
        return well

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self._told)


def make_table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table of speeds."""
    if not rows:
        return []
    lines = [f"\n{'training':<28} {'tokens/s':>10} {'MFU':>7} {'peak GiB':>9} {'forecast':>9} {'ratio':>6}"]
    for row in rows:
        mfu = "?" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"{row['name']:<28} {row['tokens_per_s']:>10.0f} {mfu:>7} {row['peak_memory_bytes'] / GIB:>9.2f} "
            f"{row['forecast_bytes'] / GIB:>9.2f} {row['peak_over_forecast']:>6.2f}"
        )
    return [*lines, ""]


def describe_host(hardware: Hardware) -> dict[str, Any]:
    """GPUs, CPU, and the versions of what computes on them; null for what is not there."""
    import torch

    return {
        "gpus": [gpu.model_dump(mode="json") for gpu in hardware.gpus],
        "driver": _find_driver() if hardware.gpus else None,
        "cuda": torch.version.cuda,
        "cpu_cores": hardware.cpu_cores,
        "memory_bytes": hardware.memory_bytes,
        "python": platform.python_version(),
        **{name.replace("-", "_"): _find_version(name) for name in PACKAGES},
    }


def _find_driver() -> str:
    pynvml.nvmlInit()
    try:
        found = pynvml.nvmlSystemGetDriverVersion()
        return found if isinstance(found, str) else found.decode()
    finally:
        pynvml.nvmlShutdown()


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
