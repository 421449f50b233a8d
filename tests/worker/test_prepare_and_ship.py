"""What travels between a host and the object store arrives whole, or is not taken."""

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest

from store import artifacts
from store.attempts import Outcome, RunInput, claim_attempt, end_attempt
from store.errors import FencedError
from store.models import Job
from store.placement import place_jobs
from store.runs import list_checkpoints
from store.session import open_session
from store.settings import Settings
from store.status import EndReason
from tests.rows import make_host, make_job
from training.rundir import RunDir, checkpoint_name, commit_folder, file_sha256, verify
from worker.prepare import PrepareError, clear_run, prepare_run
from worker.ship import expire_checkpoints, ship_checkpoint, write_archive


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    return run


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Settings) -> None:
    """`tiny` is a folder of this host."""
    from store import settings

    (tmp_path / "models.json").write_text(
        json.dumps({"tiny": "/models/tiny", "far": {"hub": "org/far", "revision": "v1"}})
    )
    monkeypatch.setenv("BURNISH_MODELS", str(tmp_path / "models.json"))
    settings.get_settings.cache_clear()


def store_file(tmp_path: Path, content: bytes) -> tuple[str, str]:
    path = tmp_path / "upload"
    path.write_bytes(content)
    artifacts.put_file("files/f1", path)
    return "files/f1", file_sha256(path)


def store_checkpoint(tmp_path: Path, step: int, **progress: int) -> tuple[int, str, dict[str, object]]:
    beside = tmp_path / f"made-{step}"
    (beside / "adapter").mkdir(parents=True)
    (beside / "adapter" / "weights").write_bytes(bytes([step]) * 1000)
    (beside / "state.pt").write_bytes(b"state")
    target = tmp_path / f"checkpoint-{step}"
    manifest = commit_folder(beside, target, {"step": step, "progress": progress})
    prefix = f"jobs/j/checkpoints/1/{step}"
    for path in target.rglob("*"):
        if path.is_file():
            artifacts.put_file(f"{prefix}/{path.relative_to(target).as_posix()}", path)
    return step, prefix, manifest


def make_input(
    file: tuple[str, str], *checkpoints: tuple[int, str, dict[str, object]], model: str = "tiny"
) -> RunInput:
    spec = {"model": model, "training_file": "file-1", "seed": 3}
    return RunInput(spec, [], 0, {"training_file": file}, list(checkpoints))


def test_the_spec_of_a_run_names_what_lies_on_its_host(tmp_path: Path, run: RunDir) -> None:
    prepare_run(run, make_input(store_file(tmp_path, b"rows")))
    spec = json.loads(run.spec.read_text())
    assert Path(spec["training_file"]).read_bytes() == b"rows"
    assert (spec["model"], spec["seed"]) == ("/models/tiny", 3)
    prepare_run(run, make_input(store_file(tmp_path, b"rows"), model="far"))
    assert json.loads(run.spec.read_text())["model"] == "org/far@v1"


def test_bytes_that_are_not_those_that_were_uploaded_are_refused(tmp_path: Path, run: RunDir) -> None:
    key, _ = store_file(tmp_path, b"rows")
    with pytest.raises(PrepareError, match="training_file"):
        prepare_run(run, make_input((key, "0" * 64)))


def test_another_host_gets_the_newest_checkpoint(tmp_path: Path, run: RunDir) -> None:
    newest, older = store_checkpoint(tmp_path, 8), store_checkpoint(tmp_path, 4)
    prepare_run(run, make_input(store_file(tmp_path, b"rows"), newest, older))
    found = run.find_resume_point()
    assert found is not None
    assert found.name == checkpoint_name(8)
    assert verify(found) is None
    assert len(run.list_checkpoints()) == 1, "one is enough"


def test_of_a_damaged_or_missing_checkpoint_the_one_before_is_taken(tmp_path: Path, run: RunDir) -> None:
    gone, damaged, older = (store_checkpoint(tmp_path, step) for step in (9, 8, 4))
    artifacts.delete(f"{gone[1]}/state.pt")
    flipped = bytearray(bytes([8]) * 1000)
    flipped[500] ^= 1
    (tmp_path / "flipped").write_bytes(flipped)
    artifacts.put_file(f"{damaged[1]}/adapter/weights", tmp_path / "flipped")
    prepare_run(run, make_input(store_file(tmp_path, b"rows"), gone, damaged, older))
    assert [path.name for path in run.list_checkpoints()] == [checkpoint_name(4)]
    assert not list(run.checkpoints.glob(".*")), "nothing half done is left"


def test_with_the_newest_come_those_that_the_run_may_come_back_to(tmp_path: Path, run: RunDir) -> None:
    newest = store_checkpoint(tmp_path, 8, best_step=4, way_back_step=2)
    others = [store_checkpoint(tmp_path, step) for step in (6, 4, 2)]
    prepare_run(run, make_input(store_file(tmp_path, b"rows"), newest, *others))
    assert [path.name for path in run.list_checkpoints()] == [checkpoint_name(step) for step in (2, 4, 8)]


def test_the_bytes_of_a_checkpoint_go_after_its_row_and_what_has_no_row_goes_too(tmp_path: Path, run: RunDir) -> None:
    with open_session() as session:
        make_host(session)
        job = make_job(session)
        place_jobs(session)
        assert claim_attempt(session, job.id, 1, "alpha")
        session.get_one(Job, job.id).plan = {"save_total_limit": 2}
    losses = {2: 0.5, 4: 0.7, 6: None, 8: 0.9}
    for step, loss in losses.items():
        (run.path / "w" / "adapter").mkdir(parents=True)
        (run.path / "w" / "adapter" / "weights").write_bytes(bytes([step]))
        progress = {"train_loss": None, "eval_loss": loss, "evaluated_step": step}
        commit_folder(run.path / "w", run.checkpoints / checkpoint_name(step), {"step": step, "progress": progress})
        ship_checkpoint(job.id, 1, run.checkpoints / checkpoint_name(step))
    for key in ("checkpoints/1/5/left", "checkpoints/2/6/of_a_later_attempt", "adapter/1.zip"):
        artifacts.put_file(f"jobs/{job.id}/{key}", run.checkpoints / checkpoint_name(2) / "manifest.json")
    expire_checkpoints(job.id, 1)
    expire_checkpoints(job.id, 1)
    with open_session() as session:
        assert [row.step for row in list_checkpoints(session, job.id, after=None, limit=9).items] == [8, 2]
    prefix = f"jobs/{job.id}"
    assert set(artifacts.list_keys(prefix)) == {
        *(f"{prefix}/checkpoints/1/{step}/{name}" for step in (2, 8) for name in ("adapter/weights", "manifest.json")),
        f"{prefix}/checkpoints/2/6/of_a_later_attempt",
        f"{prefix}/adapter/1.zip",
    }
    with open_session() as session:
        end_attempt(session, job.id, 1, Outcome(EndReason.STOPPED, "stopped"))
    with pytest.raises(FencedError):
        expire_checkpoints(job.id, 1)


def test_the_weights_of_an_earlier_job_come_as_a_folder(tmp_path: Path, run: RunDir) -> None:
    inputs = make_input(store_file(tmp_path, b"rows"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("adapter_config.json", "{}")
    artifacts.put_file("jobs/j/adapter/1.zip", tmp_path / "a.zip")
    start = {"adapter.zip": ("jobs/j/adapter/1.zip", file_sha256(tmp_path / "a.zip"))}
    prepare_run(run, dataclasses.replace(inputs, start=start))
    folder = Path(json.loads(run.spec.read_text())["resume_from"])
    assert (folder / "adapter" / "adapter_config.json").read_text() == "{}"

    _, prefix, manifest = store_checkpoint(tmp_path, 8)
    sums = {entry["name"]: entry["sha256"] for entry in manifest["files"]}  # type: ignore[attr-defined]
    start = {"adapter/weights": (f"{prefix}/adapter/weights", sums["adapter/weights"])}
    prepare_run(run, dataclasses.replace(inputs, start=start))
    assert (folder / "adapter" / "weights").read_bytes() == bytes([8]) * 1000
    with pytest.raises(PrepareError, match="adapter/weights"):
        prepare_run(
            run, dataclasses.replace(inputs, start={"adapter/weights": (start["adapter/weights"][0], "0" * 64)})
        )
    clear_run(run)
    assert not folder.exists()


def test_a_newer_checkpoint_of_this_host_is_kept(tmp_path: Path, run: RunDir) -> None:
    stored = store_checkpoint(tmp_path, 4)
    (tmp_path / "local" / "adapter").mkdir(parents=True)
    (tmp_path / "local" / "adapter" / "weights").write_bytes(b"9")
    commit_folder(tmp_path / "local", run.checkpoints / checkpoint_name(9), {"step": 9})
    prepare_run(run, make_input(store_file(tmp_path, b"rows"), stored))
    assert [path.name for path in run.list_checkpoints()] == [checkpoint_name(9)]


def test_equal_folders_give_equal_archives_without_the_manifest(tmp_path: Path) -> None:
    sums = set()
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("z.json", "b.safetensors"):
            (folder / file).write_bytes(file.encode() * 100)
        commit_folder(folder, tmp_path / f"{name}-done", {"made_by": name})
        write_archive(tmp_path / f"{name}-done", tmp_path / f"{name}.zip")
        sums.add(file_sha256(tmp_path / f"{name}.zip"))
    assert len(sums) == 1
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.namelist() == ["b.safetensors", "z.json"]
        assert archive.testzip() is None
