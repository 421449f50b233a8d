"""Whole runs of dpo, kto and pretrain: what may be asked, what is planned, what is told."""

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    StopAtCheck,
    curve_of,
    events_of,
    last_event,
    make_job,
    read_json,
    same_weights,
    train_here,
    weights_of,
)

from tests.tiny import make_pairs, make_rows, write_rows
from training.errors import SpecError
from training.facts import Counts, DataFacts, ModelFacts
from training.hardware import Hardware
from training.plan import Plan, make_plan
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from training.spec import parse_spec

REWARDS = {"rewards_chosen", "rewards_rejected", "reward_margin", "logps_chosen", "logps_rejected"}
METRICS = {"dpo": {*REWARDS, "reward_accuracy"}, "kto": {*REWARDS, "kl"}, "pretrain": set()}


def body_of(method: str, **hyper: Any) -> dict[str, Any]:
    return {"model": "m", "training_file": "f", "method": {"type": method, method: {"hyperparameters": hyper}}}


def plan_of(method: str, adapter: str = "lora", start: str | None = None, **hyper: Any) -> Plan:
    model = ModelFacts(
        family="llama", hidden_size=2000, intermediate_size=1, layers=1, vocabulary=9, parameters=9,
        trained_parameters=1, context_tokens=64,
    )  # fmt: skip
    counts = Counts(rows=40, trained_rows=40)
    data = DataFacts(
        counts=counts, examples=90, longest_tokens=20, longest_trained_tokens=9, tokens=99, trained_tokens=9
    )
    spec = parse_spec({**body_of(method, **hyper), "adapter": {"type": adapter}, "resume_from": start})
    return make_plan(spec, Hardware(cpu_cores=1, memory_bytes=2**33), model, data)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (body_of("dpo", beta=0), "method.dpo.hyperparameters.beta", "above 0 and up to 2"),
        (body_of("dpo", beta=2.5), "method.dpo.hyperparameters.beta", "2.5 is not a number"),
        (body_of("dpo", beta="low"), "method.dpo.hyperparameters.beta", 'or "auto"'),
        (body_of("dpo", train_on="all"), "method.dpo.hyperparameters.train_on", "unknown field"),
        (body_of("supervised", beta=0.1), "method.supervised.hyperparameters.beta", "unknown field"),
        (body_of("kto", desirable_weight=0), "method.kto.hyperparameters.desirable_weight", "greater than 0"),
        (body_of("kto", undesirable_wight=1), "method.kto.hyperparameters.undesirable_wight", "undesirable_weight"),
        (body_of("orpo"), "method.type", "not offered yet"),
        ({**body_of("dpo"), "adapter": {"type": "full"}}, "adapter.type", "which a full fine-tuning changes"),
        ({**body_of("kto"), "adapter": {"type": "full"}}, "adapter.type", "which a full fine-tuning changes"),
        ({**body_of("dpo"), "hyperparameters": {}}, "hyperparameters", "method.dpo.hyperparameters"),
        ({**body_of("dpo"), "method": {"dpo": {}}}, "method.dpo", 'set type to "dpo"'),
        ({**body_of("dpo"), "method": {"type": "dpo", "supervised": {}}}, "method.supervised", "type of the method"),
    ],
)
def test_what_a_method_does_not_take_is_refused_with_its_place(body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(body)
    assert refused.value.param == param
    assert said in refused.value.message


def test_beta_is_a_tenth_where_it_is_not_given() -> None:
    for hyper in ({}, {"beta": "auto"}):
        plan = plan_of("dpo", **hyper)
        assert plan.beta == 0.1
        assert "Rafailov" in plan.reasons["beta"]
    assert plan_of("dpo", beta=0.5).beta == 0.5
    assert plan_of("supervised").beta is None


def test_answers_that_are_compared_with_the_base_are_trained_at_the_rates_of_the_papers() -> None:
    assert plan_of("dpo").learning_rate == pytest.approx(1e-5)
    assert plan_of("kto").learning_rate == pytest.approx(5e-6)
    assert plan_of("pretrain", "full").learning_rate == plan_of("supervised", "full").learning_rate


def test_batches_and_epochs_go_by_pieces_of_texts_and_both_sides_of_a_pair_need_memory() -> None:
    assert plan_of("pretrain", batch_size=10, n_epochs=1).steps == 9
    asked = {"batch_size": 4, "micro_batch_size": 1}
    pair, row = plan_of("dpo", **asked).memory, plan_of("supervised", **asked).memory
    assert pair.activations_bytes == 2 * row.activations_bytes
    assert pair.logits_bytes == 2 * row.logits_bytes


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_start_that_is_compared_with_is_kept_in_fp32_beside_what_is_trained(method: str) -> None:
    assert plan_of(method, start="r").memory.weights_bytes == plan_of(method).memory.weights_bytes + 4
    assert plan_of("supervised", start="r").memory == plan_of("supervised").memory


@pytest.mark.parametrize("method", METRICS)
def test_a_run_learns_and_tells_its_metrics(method: str, tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, method=method, hyper={"n_epochs": 4})) == EXIT_FINISHED
    steps = [event.data for event in events_of(tmp_path / "run", "metrics")]
    assert METRICS[method] <= set().union(*steps)
    assert steps[-1]["train_loss"] < steps[0]["train_loss"]
    assert all(math.isfinite(value) for data in steps for value in data.values())
    evaluated = [event.data for event in events_of(tmp_path / "run", "evaluated")]
    assert {f"eval_{name}" for name in METRICS[method]} <= set(evaluated[-1])
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert last_event(tmp_path / "run").data["eval_loss"] == evaluated[-1]["eval_loss"]
    assert read_json(tmp_path / "run" / "plan.json")["method"] == method


def test_the_first_step_of_dpo_knows_no_better_answer(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", make_job(tmp_path, method="dpo", hyper={"n_epochs": 2})) == EXIT_FINISHED
    first, *_, last = [event.data for event in events_of(tmp_path / "run", "metrics")]
    assert first["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (first["rewards_chosen"], first["reward_margin"], first["reward_accuracy"]) == (0.0, 0.0, 0.0)
    assert last["reward_accuracy"] == 1.0
    assert last["reward_margin"] == pytest.approx(last["rewards_chosen"] - last["rewards_rejected"], rel=1e-5)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_curve_does_not_depend_on_how_a_batch_is_cut(method: str, tmp_path: Path) -> None:
    curves = []
    for micro in (1, 2, 4):
        body = make_job(tmp_path, method=method, hyper={"micro_batch_size": micro, "n_epochs": 1})
        assert train_here(tmp_path / str(micro), body) == EXIT_FINISHED
        curves.append(curve_of(tmp_path / str(micro), with_flops=False))
    want, *others = curves
    for got in others:
        assert got.keys() == want.keys()
        for place, data in want.items():
            assert got[place] == pytest.approx(data, rel=1e-4, abs=2e-5), place


def test_a_run_of_kto_may_be_stopped_while_it_measures_its_reference_point(tmp_path: Path) -> None:
    body = make_job(tmp_path, method="kto", adapter={"dropout": 0.3})
    assert train_here(tmp_path / "whole", body) == EXIT_FINISHED
    # Eight looks a step, four of them before the first pass: this is the third of the second step.
    assert train_here(tmp_path / "run", body, stop=lambda run_dir: StopAtCheck(run_dir, 11)) == EXIT_STOPPED
    assert last_event(tmp_path / "run").step == 1
    assert train_here(tmp_path / "run", body, attempt=2) == EXIT_FINISHED
    assert curve_of(tmp_path / "run") == curve_of(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "adapter", tmp_path / "whole" / "adapter")


def test_labels_are_counted_in_the_plan(tmp_path: Path) -> None:
    assert (
        train_here(tmp_path / "run", make_job(tmp_path, method="kto", rows=7, hyper={"n_epochs": 1})) == EXIT_FINISHED
    )
    counts = read_json(tmp_path / "run" / "plan.json")["counts"]
    assert (counts["desirable"], counts["undesirable"]) == (4, 3)


def test_an_answer_far_beyond_the_limit_leaves_the_loss_finite(tmp_path: Path) -> None:
    body = make_job(tmp_path, method="dpo", hyper={"n_epochs": 1, "batch_size": 1, "max_seq_len": 64})
    pair, *_ = make_pairs(1)
    pair["non_preferred_output"] = [{"role": "assistant", "content": "word " * 400}]
    write_rows(tmp_path / "rows.jsonl", [pair])
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    (metrics,) = events_of(tmp_path / "run", "metrics")
    assert metrics.data["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert read_json(tmp_path / "run" / "plan.json")["counts"]["truncated"] == 1


def test_rows_of_another_method_fail_the_run_and_say_whose_they_are(tmp_path: Path) -> None:
    body = make_job(tmp_path, method="dpo")
    write_rows(tmp_path / "rows.jsonl", make_rows(3))
    assert train_here(tmp_path / "run", body) == EXIT_FAILED
    failure = last_event(tmp_path / "run").data
    assert (failure["code"], failure["param"], failure["fault"]) == ("wrong_format", "training_file", "data")
    assert failure["message"].startswith("line 1: a chat row")


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_checkpointed_activations_change_nothing(method: str, tmp_path: Path) -> None:
    for checkpointing in (False, True):
        body = make_job(tmp_path, method=method, hyper={"n_epochs": 1}, gradient_checkpointing=checkpointing)
        assert train_here(tmp_path / str(checkpointing), body) == EXIT_FINISHED
    assert curve_of(tmp_path / "True", with_flops=False) == curve_of(tmp_path / "False", with_flops=False)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_in_bf16_every_matrix_of_the_adapter_learns_beside_the_passes_of_the_base(method: str, tmp_path: Path) -> None:
    body = make_job(tmp_path, method=method, hyper={"n_epochs": "auto", "max_steps": 3}, precision="bf16")
    assert train_here(tmp_path / "run", body) == EXIT_FINISHED
    early, late = (weights_of(tmp_path / "run" / "checkpoints" / f"step-0000000{step}" / "adapter") for step in (2, 3))
    assert early.keys() == late.keys()
    assert all(bool((early[name] != late[name]).any()) for name in early)
