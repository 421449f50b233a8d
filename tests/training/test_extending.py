"""A run that is started again with more steps makes those that are missing; every other change is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import curve_of, events_of, last_event, make_job, same_weights, train_here

from training.errors import SpecError
from training.launch import write_spec
from training.rundir import EXIT_FAILED, EXIT_FINISHED, RunDir, write_json

CONSTANT = {"lr_scheduler": "constant", "warmup_steps": 0, "learning_rate": 0.01, "eval_steps": 3}


def job_of(folder: Path, **hyper: Any) -> dict[str, Any]:
    return make_job(folder, hyper={**CONSTANT, **hyper}, adapter={"dropout": 0.2})


def write_body(folder: Path, body: dict[str, Any]) -> Path:
    write_json(folder / "body.json", body)
    return folder / "body.json"


def test_an_extended_run_is_one_that_was_asked_for_all_of_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert train_here(path, job_of(tmp_path, n_epochs=1)) == EXIT_FINISHED
    assert last_event(path).data["steps"] == 3
    assert train_here(path, job_of(tmp_path, n_epochs=3), attempt=2) == EXIT_FINISHED
    assert [event.step for event in events_of(path, "metrics")] == list(range(1, 10))
    assert last_event(path).data["steps"] == 9
    assert train_here(tmp_path / "whole", job_of(tmp_path, n_epochs=3)) == EXIT_FINISHED
    assert curve_of(path) == curve_of(tmp_path / "whole")
    assert same_weights(path / "adapter", tmp_path / "whole" / "adapter")


def test_also_from_the_middle_of_an_epoch_and_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for attempt, epochs in enumerate((0.5, 1.5, 2), 1):
        assert train_here(path, job_of(tmp_path, n_epochs=epochs), attempt) == EXIT_FINISHED
    assert train_here(path, job_of(tmp_path, n_epochs="auto", max_steps=7), 4) == EXIT_FINISHED
    assert train_here(tmp_path / "whole", job_of(tmp_path, n_epochs="auto", max_steps=7)) == EXIT_FINISHED
    assert same_weights(path / "adapter", tmp_path / "whole" / "adapter")


def test_the_rates_from_there_on_are_those_of_the_longer_run(tmp_path: Path) -> None:
    rates = {}
    for name, lengths in {"run": (1, 3), "whole": (3,)}.items():
        for attempt, epochs in enumerate(lengths, 1):
            body = job_of(tmp_path, n_epochs=epochs, lr_scheduler="linear")
            assert train_here(tmp_path / name, body, attempt) == EXIT_FINISHED
        curve = curve_of(tmp_path / name)
        rates[name] = {step: data["learning_rate"] for (step, kind), data in curve.items() if kind == "metrics"}
    assert [rates["run"][step] for step in range(4, 10)] == [rates["whole"][step] for step in range(4, 10)]
    assert rates["run"][3] < rates["whole"][3]


def test_less_than_what_was_made_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert train_here(path, job_of(tmp_path, n_epochs=2)) == EXIT_FINISHED
    assert train_here(path, job_of(tmp_path, n_epochs=1), attempt=2) == EXIT_FAILED
    failure = last_event(path).data
    assert failure["param"] == "method.supervised.hyperparameters.n_epochs"
    assert "3 steps in all, and the run has made 6 already" in failure["message"]
    assert len(RunDir(path).list_checkpoints()) == 3


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("learning_rate", {"hyper": {"learning_rate": 0.02}}),
        ("batch_size", {"hyper": {"batch_size": 5}}),
        ("seed", {"seed": 5}),
        ("adapter", {"adapter": {"r": 4}}),
        ("precision", {"precision": "fp32"}),
    ],
)
def test_any_other_change_is_refused_and_named(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_spec(write_body(tmp_path, job_of(tmp_path, n_epochs=1)), run_dir)
    assert train_here(run_dir.path, job_of(tmp_path, n_epochs=1)) == EXIT_FINISHED
    changed = {
        **job_of(tmp_path, n_epochs=2, **change.get("hyper", {})),
        **{k: v for k, v in change.items() if k != "hyper"},
    }
    before = run_dir.spec.read_bytes()
    with pytest.raises(SpecError, match=f"^{name}: not as in the run of") as refused:
        write_spec(write_body(tmp_path, changed), run_dir)
    assert (refused.value.code, refused.value.param) == ("other_run", name)
    assert run_dir.spec.read_bytes() == before


def test_what_may_change_is_taken_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    body = job_of(tmp_path, n_epochs=1)
    write_spec(write_body(tmp_path, body), run_dir)
    assert train_here(run_dir.path, body) == EXIT_FINISHED
    longer = {**job_of(tmp_path, n_epochs=2, save_steps=1, eval_steps=1, save_total_limit=2), "suffix": "longer"}
    write_spec(write_body(tmp_path, longer), run_dir)
    assert train_here(run_dir.path, longer, attempt=2) == EXIT_FINISHED
    assert last_event(run_dir.path).data["steps"] == 6
