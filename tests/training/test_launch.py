"""The engine from the command line: exit codes, readable errors, signals, and no torch in the one who starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import events_of, last_event, make_job, read_json, train_here

from tests.tiny import make_rows, write_rows
from training.errors import SpecError
from training.events import Event
from training.launch import make_command, make_environment, make_line, write_spec
from training.rundir import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RunDir

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=cwd, timeout=120)


def write_body(folder: Path, body: dict[str, Any]) -> Path:
    file = folder / "spec.json"
    file.write_text(json.dumps(body))
    return file


# Pure parts


def test_the_command_of_a_rank_is_this() -> None:
    assert make_command(Path("/runs/a b"), 3) == [sys.executable, "-m", "training.rank", "/runs/a b", "--attempt", "3"]
    assert make_command(Path("/runs/1"), 1, plan_only=True)[-1] == "--plan-only"


def test_a_rank_sees_of_the_environment_what_it_needs_and_no_secret() -> None:
    starter = {
        "PATH": "/bin", "HOME": "/root", "HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1",
        "BURNISH_DATABASE_URL": "postgresql://secret", "BURNISH_MODEL_CACHE": "/cache", "PGPASSWORD": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret", "GOMP_SPINCOUNT": "7",
    }  # fmt: skip
    before = dict(starter)
    assert make_environment(starter) == {
        "PATH": "/bin", "HOME": "/root", "HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1",
        "BURNISH_MODEL_CACHE": "/cache", "GOMP_SPINCOUNT": "7", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
        "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    assert starter == before


def test_gpus_offline_and_the_model_cache_are_told_to_the_rank() -> None:
    environment = make_environment({}, gpus=[2, 3], offline=True, model_cache=Path("/models"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["BURNISH_MODEL_CACHE"] == "/models"
    assert make_environment({"CUDA_VISIBLE_DEVICES": "0"}, gpus=[])["CUDA_VISIBLE_DEVICES"] == ""
    assert "HF_HUB_OFFLINE" not in make_environment({})


def test_a_step_is_one_short_line() -> None:
    data = {"epoch": 0.5, "train_loss": 1.23456, "learning_rate": 2e-4, "grad_norm": 0.7, "tokens_per_s": 99.6}
    line = make_line(Event(1, 0.0, 1, "metrics", 5, data), 20)
    assert line == "step 5/20  epoch 0.50  loss 1.2346  lr 2.00e-04  grad norm 0.7000  100 tokens/s"
    used = make_line(Event(1, 0.0, 1, "metrics", 5, {**data, "mfu": 0.412}), 20)
    assert used == f"{line}  mfu 41%"
    assert "loss not finite" in str(make_line(Event(1, 0.0, 1, "metrics", 5, {**data, "train_loss": None}), 20))


def test_paths_are_made_absolute_so_that_a_run_goes_on_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl", make_rows(1))
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = write_body(tmp_path, {"model": "base", "training_file": "rows.jsonl"})
    write_spec(spec, RunDir(tmp_path / "run"))
    asked = {"model": str(tmp_path / "base"), "training_file": str(tmp_path / "rows.jsonl")}
    assert read_json(tmp_path / "run" / "spec.json") == asked


def test_a_directory_with_checkpoints_of_another_spec_is_refused_and_keeps_its_spec(tmp_path: Path) -> None:
    body = make_job(tmp_path)
    train_here(tmp_path / "run", body)
    changed = write_body(tmp_path, {**body, "seed": 5})
    with pytest.raises(SpecError, match="choose another run directory"):
        write_spec(changed, RunDir(tmp_path / "run"))
    assert read_json(tmp_path / "run" / "spec.json") == body


def test_a_run_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    spec = write_body(tmp_path, {"model": "m", "training_file": "f"})
    (tmp_path / "full" / "spec.json").mkdir(parents=True)
    for place in (spec, spec / "below", Path("/proc/nope"), tmp_path / "full"):
        refused = call("run", spec, "--run-dir", place)
        assert (refused.returncode, refused.stdout) == (EXIT_FAILED, "")
        assert refused.stderr.startswith(f"error: {place}") and "choose another run directory" in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b'{"model": "m', b"\xff", b"[" * 100_000])
def test_checkpoints_beside_a_damaged_spec_are_left_to_their_owner(tmp_path: Path, content: bytes) -> None:
    spec = write_body(tmp_path, {"model": "m", "training_file": "f"})
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    own = tmp_path / "run" / "spec.json"
    own.write_bytes(content)
    with pytest.raises(SpecError, match="is damaged"):
        write_spec(spec, RunDir(tmp_path / "run"))
    assert own.read_bytes() == content


def test_starting_a_run_loads_no_torch() -> None:
    code = "import sys, training.__main__; print({'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert loaded.stdout.strip() == "set()"


# The command line


def test_a_run_ends_with_0_shows_its_steps_and_goes_on_when_asked_again(tmp_path: Path) -> None:
    spec = write_body(tmp_path, make_job(tmp_path))
    first = call("run", spec, "--run-dir", tmp_path / "run")
    assert (first.returncode, first.stderr) == (EXIT_FINISHED, "")
    lines = first.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step") and "lr" in line] == [
        f"step {step}/6" for step in range(1, 7)
    ]
    assert lines[-1].startswith("finished")
    assert {"adapter", "checkpoints", "events.jsonl", "log.txt", "plan.json", "spec.json"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
    again = call("run", spec, "--run-dir", tmp_path / "run", "--quiet")
    assert (again.returncode, again.stdout, again.stderr) == (EXIT_FINISHED, "", "")
    assert {event.attempt for event in events_of(tmp_path / "run")} == {1, 2}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_run_ends_with_3_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    body = make_job(tmp_path, hyper={"n_epochs": 1000, "eval_steps": 1000, "save_steps": 1000})
    command = [sys.executable, "-m", "training", "run", write_body(tmp_path, body), "--run-dir", tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 3/"):
        assert process.poll() is None
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED
    assert f"asked by {number.name}; the same command goes on from there" in rest
    stopped = last_event(tmp_path / "run")
    assert stopped.type == "stopped"
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped.step:08d}").is_dir()


def test_a_signal_before_training_begins_stops_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training", "run", write_body(tmp_path, make_job(tmp_path))]
    process = subprocess.Popen([*command, "--run-dir", tmp_path / "run"], env=ENVIRONMENT)
    while not (tmp_path / "run" / "log.txt").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == EXIT_STOPPED
    assert not RunDir(tmp_path / "run").list_checkpoints()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"model": "m", "training_file": "f", "n_epoch": 3}', "n_epoch"),
        ('{"model": "m"', "not JSON"),
        ('{"model": 3, "training_file": "f"}', "model: 3 is not text"),
    ],
)
def test_a_refused_spec_is_one_readable_line_and_ends_with_1(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "spec.json").write_text(content)
    for command in (["run", tmp_path / "spec.json", "--run-dir", tmp_path / "run"], ["plan", tmp_path / "spec.json"]):
        refused = call(*command)
        assert (refused.returncode, refused.stdout) == (EXIT_FAILED, "")
        assert refused.stderr.startswith("error: ")
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_failed_run_is_one_readable_line_and_ends_with_1(tmp_path: Path) -> None:
    body = {**make_job(tmp_path), "adapter": {"target_modules": ["q_prj"]}}
    failed = call("run", write_body(tmp_path, body), "--run-dir", tmp_path / "run")
    assert failed.returncode == EXIT_FAILED
    assert failed.stderr.startswith("error: adapter.target_modules: ")
    assert failed.stderr.count("\n") == 1


def test_a_rank_that_is_killed_is_told_as_such(tmp_path: Path) -> None:
    body = make_job(tmp_path, hyper={"n_epochs": 1000})
    command = [sys.executable, "-m", "training", "run", write_body(tmp_path, body), "--run-dir", tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None
    os.kill(events_of(tmp_path / "run", "started")[0].data["pid"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_FAILED
    assert said.startswith("error: the training process was killed (SIGKILL)")


def test_a_plan_is_json_on_stdout_and_needs_no_weights(tmp_path: Path) -> None:
    body = make_job(tmp_path)
    (tmp_path / "base" / "model.safetensors").unlink()
    planned = call("plan", write_body(tmp_path, body))
    assert (planned.returncode, planned.stderr) == (EXIT_FINISHED, "")
    plan = json.loads(planned.stdout)
    assert (plan["steps"], plan["counts"]["trained_rows"]) == (6, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "rows.jsonl", "spec.json", "validation.jsonl"}


def test_a_file_is_validated_with_its_lines(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", make_rows(3))
    bad = write_rows(tmp_path / "bad.jsonl", [*make_rows(1), {"messages": 3}])
    right, wrong, missing = call("validate", good), call("validate", bad), call("validate", tmp_path / "none")
    assert (right.returncode, json.loads(right.stdout)["rows"]) == (EXIT_FINISHED, 3)
    assert (wrong.returncode, json.loads(wrong.stdout)["errors"][0]["line"]) == (EXIT_FAILED, 2)
    assert missing.returncode == EXIT_FAILED
    assert missing.stderr.startswith("error: ")
