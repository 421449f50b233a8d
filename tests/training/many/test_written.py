"""What several ranks write, and what they do where a step goes wrong: as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_rows, save_model, write_rows
from tests.training.many.ranks import Case, find_difference, on_ranks, train_on_ranks, without_weights
from tests.training.tiny_runs import events_of, last_event, make_job, read_json, same_weights, train_here, weights_of
from training.rank.order import make_order
from training.rundir import EXIT_FAILED, EXIT_FINISHED

# The first test of a launch waits for all runs of it.
pytestmark = pytest.mark.timeout(900)

STANDING = {"max_steps": 2, "n_epochs": "auto", "learning_rate": 1e-30}
"""A rate so small that no weight moves."""

BAD_STEP = 5
STRATEGIES = ("ddp", "fsdp", "pipeline")


def make_worsening(folder: Path, **more: Any) -> dict[str, Any]:
    """The validation loss rises from some step on: the rate is far too high."""
    hyper = {"n_epochs": 6, "learning_rate": 0.2, "lr_scheduler": "constant", "early_stopping": {"patience": 2}}
    return make_job(folder, rows=9, hyper={**hyper, "eval_steps": 2, "save_steps": 100}, **more)


def make_spoilt(folder: Path, **stability: Any) -> tuple[dict[str, Any], int]:
    """A row of letters that nobody expects, in step 5, and a bound that it breaks; the line of that row."""
    rows, hyper = make_rows(40), {"n_epochs": 1, "save_steps": 2, "eval_steps": 100, "lr_scheduler": "constant"}
    bad = make_order(40, 0, 0)[4 * BAD_STEP - 1]
    rows[bad]["messages"][1]["content"] = "QQQ"
    body = make_job(folder, hyper=hyper, stability=stability)
    file = next((folder / "base").glob("*.safetensors"))
    tensors = weights_of(folder / "base")
    tensors["model.embed_tokens.weight"][ord("Q") - ord("!")] = torch.nan  # the byte-level alphabet begins with "!"
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    write_rows(folder / "rows.jsonl", rows)
    return body, bad + 1


class Made:
    """All runs of this module in one start of two ranks, and the same in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        jobs = {
            "standing": self._make("standing", hyper=STANDING, adapter={"type": "full"}),
            "16 bits": self._make("16 bits", dtype=torch.bfloat16, precision="bf16", adapter={"type": "full"}),
            "fp16": self._make("fp16", precision="fp16", adapter={"type": "full"}),
        }
        for kind in ("full", "lora"):
            (folder / f"worsening {kind}").mkdir()
            jobs[f"worsening {kind}"] = make_worsening(folder / f"worsening {kind}", adapter={"type": kind})
        self.lines = {}
        for action in ("skip", "rollback", "stop"):
            (folder / action).mkdir()
            jobs[action], self.lines[action] = make_spoilt(folder / action, on_nan=action)
        self.codes = {}
        cases = {}
        for job, body in jobs.items():
            self.codes[job, "one"] = [train_here(folder / job / "one", body)]
            for strategy in STRATEGIES:
                cases[job, strategy] = Case(folder / job / strategy, on_ranks(body, 2, strategy))
        self.codes |= dict(zip(cases, train_on_ranks(folder, 2, list(cases.values())), strict=True))

    def _make(self, job: str, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
        (self.folder / job).mkdir()
        save_model(self.folder / job / "base", dtype=dtype)
        return make_job(self.folder / job, rows=9, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_keeps_a_part_of_what_is_saved(strategy: str, made: Made) -> None:
    """Untrained, the result is the base, bit for bit: no weight is empty, cut, or another's."""
    assert made.codes["standing", strategy] == [EXIT_FINISHED] * 2
    folder = made.folder / "standing"
    assert same_weights(folder / strategy / "model", folder / "base")
    assert same_weights(folder / strategy / "checkpoints" / "step-00000002" / "model", folder / "base")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_fine_tune_in_16_bits_is_delivered_in_the_type_of_its_base(strategy: str, made: Made) -> None:
    """Checkpoints are in fp32. Rounding to bf16 as it computes takes the two apart by more than in fp32."""
    folder = made.folder / "16 bits"
    assert made.codes["16 bits", strategy] == [EXIT_FINISHED] * 2
    assert {w.dtype for w in weights_of(folder / strategy / "model").values()} == {torch.bfloat16}
    assert read_json(folder / strategy / "model" / "config.json")["dtype"] == "bfloat16"
    assert find_difference(folder / strategy / "model", folder / "one" / "model") < 2e-2
    assert without_weights(folder / strategy / "model") == without_weights(folder / "one" / "model")
    saved = weights_of(folder / strategy / "checkpoints" / "step-00000006" / "model")
    assert {w.dtype for w in saved.values()} == {torch.float32}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_overflows_fp16_is_skipped_by_all(strategy: str, made: Made) -> None:
    folder = made.folder / "fp16"
    assert made.codes["fp16", strategy] == [EXIT_FINISHED] * 2
    for name in ("loss_scale", "learning_rate", "num_tokens"):
        got, want = ([e.data[name] for e in events_of(folder / run, "metrics")] for run in (strategy, "one"))
        assert got == want
    assert find_difference(folder / strategy / "model", folder / "one" / "model") < 2e-2


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_early_stopping_gives_the_best_weights_bit_for_bit(strategy: str, kind: str, made: Made) -> None:
    job = f"worsening {kind}"
    path, one = made.folder / job / strategy, made.folder / job / "one"
    assert made.codes[job, strategy] == [EXIT_FINISHED] * 2
    ended, want = last_event(path), last_event(one)
    assert (ended.step, ended.data["best_step"]) == (want.step, want.data["best_step"])
    assert ended.data["best_step"] < ended.step
    result = "model" if kind == "full" else "adapter"
    best = path / "checkpoints" / f"step-{ended.data['best_step']:08d}" / result
    assert same_weights(path / result, best)


@pytest.mark.parametrize("action", ["skip", "rollback", "stop"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_agree_on_what_went_wrong_and_name_the_row(strategy: str, action: str, made: Made) -> None:
    """Only one of them has the row whose loss is not finite."""
    path, one = made.folder / action / strategy, made.folder / action / "one"
    code = EXIT_FAILED if action == "stop" else EXIT_FINISHED
    assert made.codes[action, "one"] == [code]
    assert made.codes[action, strategy] == [code] * 2
    got, want = ([(e.step, e.data) for e in events_of(run, "warning")] for run in (path, one))
    assert got == want
    if action != "stop":
        assert want[0][0] == BAD_STEP
        assert want[0][1]["lines"] == [made.lines[action]]
        assert find_difference(path / "adapter", one / "adapter") < 2e-4
