"""Runs of tiny models in this process, on real run directories."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import make_body, make_labelled, make_pairs, make_rows, make_texts, save_model, write_rows
from training.events import Event, read_events
from training.rank import run as run_module
from training.rank.model import DTYPES
from training.rank.run import run
from training.rank.stop import Stop
from training.rank.weights import save_weights
from training.rundir import RunDir, write_json

TIMES = {"tokens_per_s", "step_s", "peak_memory_bytes", "mfu", "seconds"}
"""What differs from one run to the next though they are equal."""


class StopAtCheck(Stop):
    """Asks to stop when the run looks for the n-th time whether it should."""

    def __init__(self, run_dir: RunDir, check: int) -> None:
        super().__init__(run_dir)
        self.checks_left = check

    def asked(self) -> bool:
        self.checks_left -= 1
        if self.checks_left <= 0:
            self.reason = "asked by the test"
        return self.reason is not None


ROWS_OF = {"supervised": make_rows, "dpo": make_pairs, "kto": make_labelled, "pretrain": make_texts}


def make_job(
    folder: Path,
    *,
    family: str = "llama",
    tied: bool = False,
    rows: int = 10,
    method: str = "supervised",
    **more: Any,
) -> dict[str, Any]:
    """A body with a model and files of its own in `folder`: two epochs of three windows, the last one smaller; a row a
    pass where no micro-batch is asked for."""
    hyper = {
        "n_epochs": 2,
        "batch_size": 4,
        "learning_rate": 0.01,
        "eval_steps": 2,
        "save_steps": 2,
        **more.pop("hyper", {}),
    }
    if "gradient_accumulation_steps" not in hyper:
        hyper.setdefault("micro_batch_size", 1)
    base = folder / "base"
    return make_body(
        base if base.exists() else save_model(base, family, tied=tied),
        write_rows(folder / "rows.jsonl", ROWS_OF[method](rows)),
        validation=write_rows(folder / "validation.jsonl", ROWS_OF[method](3, start=50)),
        method=method,
        hyper=hyper,
        **more,
    )


def train_here(path: Path, body: dict[str, Any], attempt: int = 1, *, stop: Callable[[RunDir], Stop] = Stop) -> int:
    """One attempt in a run directory; the exit code."""
    run_dir = RunDir(path)
    path.mkdir(exist_ok=True)
    write_json(run_dir.spec, body)
    return run(run_dir, attempt, stop(run_dir))


@contextmanager
def in_double() -> Iterator[None]:
    """Runs in fp32 are computed in fp64, but for what transformers itself casts in the course of a row, such as norms:
    what is left between two ways to the same numbers is no rounding then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DTYPES, "fp32", torch.float64)
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor.double())
        yield


def watch_results(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    """What a model answers each time its weights are about to be written as the result."""
    seen: list[torch.Tensor] = []

    def save(model: Any, *others: Any) -> None:
        seen.append(answer(model))
        save_weights(model, *others)

    monkeypatch.setattr(run_module, "save_weights", save)
    return seen


def events_of(path: Path, *types: str) -> list[Event]:
    """The events of a run directory, of these types where any are named."""
    events, _ = read_events(RunDir(path).events, 0)
    return [event for event in events if not types or event.type in types]


def last_event(path: Path) -> Event:
    return events_of(path)[-1]


def curve_of(path: Path, *, with_flops: bool = True) -> dict[tuple[int, str], dict[str, Any]]:
    """What was measured at each step, without times; of a step that was done twice the later attempt counts. FLOPs
    differ where the same result is computed in another way."""
    left_out = set() if with_flops else {"flops"}
    return {
        (event.step, event.type): {
            name: value for name, value in without_times(event.data).items() if name not in left_out
        }
        for event in events_of(path, "metrics", "evaluated")
    }


def without_times(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in TIMES}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, bit for bit."""
    a, b = weights_of(one), weights_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
