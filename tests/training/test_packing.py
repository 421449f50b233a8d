"""Several rows in one sequence: as full as can be, nothing lost, and each row as if it were alone."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import curve_of, events_of, last_event, make_job, read_json, train_here
from transformers import LlamaForCausalLM

from tests.tiny import make_model, make_rows, write_rows
from training.errors import SpecError
from training.rank.data import Example
from training.rank.loss import compute_logits, make_batch
from training.rank.model import forward_names
from training.rank.packing import make_packs
from training.rundir import EXIT_FAILED, EXIT_FINISHED
from training.spec import parse_spec

CPU = torch.device("cpu")
LIMIT = 120


def job_of(folder: Path, **hyper: Any) -> dict[str, Any]:
    return make_job(folder, hyper={"max_seq_len": LIMIT, "packing": True, **hyper})


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_pack_none_is_too_long_and_there_are_few(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 100) for _ in range(500)]
    packs = make_packs(lengths, 100)
    assert sorted(row for pack in packs for row in pack) == list(range(500))
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= 100
    assert len(packs) <= 11 / 9 * math.ceil(sum(lengths) / 100) + 1
    assert make_packs(lengths, 100) == packs


def test_packs_at_their_ends() -> None:
    assert make_packs([100], 100) == [(0,)]
    assert make_packs([40, 100, 60, 1], 100) == [(1,), (2, 0), (3,)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_to_change_one_row_of_a_pack_leaves_the_logits_of_the_others(family: str, attention: str) -> None:
    model = make_model(family, attention=attention).eval()
    rows = [Example(n, ids, ids) for n, ids in enumerate(([5] * 9, [*range(20, 41)], [*range(60, 72)]))]
    places = {0: slice(0, 8), 1: slice(8, 28), 2: slice(28, 39)}
    with torch.no_grad():
        packed = compute_logits(model, make_batch(rows, CPU))
        alone = {n: compute_logits(model, make_batch([row], CPU)) for n, row in enumerate(rows)}
        for changed in range(3):
            other = [100 + token for token in rows[changed].input_ids]
            others = [Example(9, other, other) if n == changed else row for n, row in enumerate(rows)]
            after = compute_logits(model, make_batch(others, CPU))
            for n, place in places.items():
                assert torch.equal(packed[place], after[place]) is (n != changed)
    assert all(torch.allclose(packed[place], alone[n], atol=1e-5) for n, place in places.items())


def test_no_row_is_asked_for_the_first_token_of_the_next() -> None:
    rows = [Example(n, ids, ids) for n, ids in enumerate(([1, 2, 3], [4, 5], [6, 7, 8]))]
    batch = make_batch(rows, CPU)
    assert batch.targets.tolist() == [2, 3, 5, 7, 8]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 1]], "the last token of a row predicts nothing"


def test_a_packed_run_trains_every_row_once_an_epoch_and_counts_sequences(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert train_here(path, job_of(tmp_path, batch_size=1, n_epochs=2)) == EXIT_FINISHED
    plan = read_json(path / "plan.json")
    assert (plan["packing"], plan["counts"]["trained_rows"]) == (True, 10)
    assert 1 < plan["steps_per_epoch"] < 10
    assert plan["steps"] == 2 * plan["steps_per_epoch"]
    steps = [event.data for event in events_of(path, "metrics")]
    assert steps[-1]["epoch"] == 2.0
    assert train_here(tmp_path / "unpacked", job_of(tmp_path, batch_size=1, n_epochs=2, packing=False)) == EXIT_FINISHED
    unpacked = [event.data for event in events_of(tmp_path / "unpacked", "metrics")]
    assert len(unpacked) == 20
    for name in ("num_tokens", "num_trained_tokens"):
        assert steps[-1][name] == unpacked[-1][name]


@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_of_all_rows_gives_the_same_curve_packed_or_not(micro: int, tmp_path: Path) -> None:
    """The whole file is one batch, as sequences or as rows."""
    hyper = {"n_epochs": 4, "eval_steps": 2}
    assert train_here(tmp_path / "rows", job_of(tmp_path, packing=False, batch_size=10, **hyper)) == EXIT_FINISHED
    packed = job_of(tmp_path, batch_size=10, micro_batch_size=micro, **hyper)
    assert train_here(tmp_path / "packs", packed) == EXIT_FINISHED
    want, got = (curve_of(tmp_path / name, with_flops=False) for name in ("rows", "packs"))
    assert got.keys() == want.keys()
    for place, data in want.items():
        for name, value in data.items():
            assert got[place][name] == pytest.approx(value, rel=2e-5), (place, name)


def test_plain_texts_are_packed_too(tmp_path: Path) -> None:
    body = job_of(tmp_path)
    body["method"] = {
        "type": "pretrain",
        "pretrain": {"hyperparameters": {"packing": True, "max_seq_len": LIMIT, "n_epochs": 1, "batch_size": 1}},
    }
    del body["validation_file"]
    write_rows(tmp_path / "rows.jsonl", [{"text": "tea " * count} for count in range(1, 20)])
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    plan = read_json(tmp_path / "run" / "plan.json")
    assert plan["counts"]["trained_rows"] == 19
    assert plan["steps"] == math.ceil(sum(4 * count + 2 for count in range(1, 20)) / LIMIT)
    last = events_of(tmp_path / "run", "metrics")[-1].data
    assert last["num_tokens"] == sum(4 * count + 2 for count in range(1, 20))


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_what_is_compared_is_not_packed(method: str) -> None:
    body = {
        "model": "m",
        "training_file": "t",
        "method": {"type": method, method: {"hyperparameters": {"packing": True}}},
    }
    with pytest.raises(SpecError, match="unknown field") as refused:
        parse_spec(body)
    assert refused.value.param == f"method.{method}.hyperparameters.packing"


def test_automatic_is_off_and_says_why(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, hyper={"max_steps": 1, "n_epochs": "auto"})) == EXIT_FINISHED
    plan = read_json(tmp_path / "run" / "plan.json")
    assert plan["packing"] is False
    assert "without padding" in plan["reasons"]["packing"]


def test_a_model_that_mixes_up_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that counts positions by itself, as some do, attends across the whole sequence."""
    forward = LlamaForCausalLM.forward

    def own_positions(self: Any, input_ids: Any = None, use_cache: Any = None, logits_to_keep: Any = 0) -> Any:
        return forward(self, input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(LlamaForCausalLM, "forward", own_positions)
    body = job_of(tmp_path, batch_size=1)
    write_rows(tmp_path / "rows.jsonl", make_rows(6))
    forward_names.cache_clear()
    try:
        assert train_here(tmp_path / "run", body) == EXIT_FAILED
    finally:
        forward_names.cache_clear()
    failure = last_event(tmp_path / "run").data
    assert failure["param"] == "method.supervised.hyperparameters.packing"
    assert "mixes up rows" in failure["message"]
    assert events_of(tmp_path / "run", "metrics") == []
