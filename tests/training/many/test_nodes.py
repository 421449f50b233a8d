"""Several nodes on this host, each with processes and a run directory of its own: what they compute is what one process
does, and whatever dies or hangs, all end within seconds and it is named."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.training.many.ranks import (
    ALL,
    ENVIRONMENT,
    WEIGHTS,
    Case,
    assert_same_training,
    find_difference,
    find_port,
    on_nodes,
    train_on_two_nodes,
)
from tests.training.many.test_ends import LONG, lives, pids_of, wait_for_step
from tests.training.many.test_written import make_spoilt, make_worsening
from tests.training.tiny_runs import curve_of, events_of, last_event, make_job, read_json, same_weights, train_here
from training.rundir import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    MEETING_SETTING,
    SILENCE_SETTING,
    TIMEOUT_SETTING,
    RunDir,
)

# The first test of a launch waits for all runs of it.
pytestmark = pytest.mark.timeout(900)
in_test_all = pytest.mark.skipif(not ALL, reason="takes long: make test-all")

STRATEGIES = {"lora with dropout": ("ddp", {"dropout": 0.3}), "full": ("fsdp", {"type": "full"})}


class Made:
    """All runs that need no launcher, in one start of two nodes with two ranks each; node 1 reads nothing of node 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cases = []
        for job, (strategy, adapter) in STRATEGIES.items():
            body = on_nodes(self.make(job, adapter=adapter), 2, 4, strategy)
            cases += [Case(self.path(job), body), Case(self.path(f"{job} again"), body, 1, stop_rank=3, stop_check=8)]
            cases.append(Case(self.path(f"{job} again"), body, attempt=2))
        self.plain = self.make("plain")
        cases.append(Case(self.path("plain"), on_nodes(self.plain, 2, 4, "ddp")))
        (folder / "worsening").mkdir()
        cases.append(Case(self.path("worsening"), on_nodes(make_worsening(folder / "worsening"), 2, 4, "ddp")))
        (folder / "spoilt").mkdir()
        self.spoilt, self.line = make_spoilt(folder / "spoilt", on_nan="rollback")
        cases.append(Case(self.path("spoilt"), on_nodes(self.spoilt, 2, 4, "fsdp")))
        codes = train_on_two_nodes(folder, 4, cases)
        stopped = {1, 4}
        assert codes == [[EXIT_STOPPED if place in stopped else EXIT_FINISHED] * 4 for place in range(len(cases))]

    def make(self, job: str, **more: Any) -> dict[str, Any]:
        (self.folder / job).mkdir()
        return make_job(self.folder / job, rows=9, **more)

    def path(self, run: str, node: int = 0) -> Path:
        return self.folder / f"node-{node}" / run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def test_nodes_compute_what_one_process_computes(made: Made) -> None:
    assert train_here(made.folder / "one", made.plain) == EXIT_FINISHED
    assert_same_training(made.path("plain"), made.folder / "one")
    body = read_json(RunDir(made.path("full")).spec)
    full = {name: value for name, value in body.items() if name not in ("parallelism", "resources")}
    assert train_here(made.folder / "one full", full) == EXIT_FINISHED
    assert_same_training(made.path("full"), made.folder / "one full")


@pytest.mark.parametrize("job", STRATEGIES)
def test_a_stopped_run_goes_on_with_the_same_bits_and_no_shared_disk(job: str, made: Made) -> None:
    """A rank of node 1 was asked to stop; there the checkpoint had to be sent."""
    whole, again = made.path(job), made.path(f"{job} again")
    (told,) = events_of(again, "stopped")
    assert 0 < told.step < 6
    assert events_of(again, "started")[1].data["resumed_from"] == told.step
    assert curve_of(again) == curve_of(whole)
    (result,) = (name for name in ("adapter", "model") if (whole / name).exists())
    assert same_weights(again / result, whole / result)


def test_only_node_0_writes(made: Made) -> None:
    for job in (*STRATEGIES, "plain", "worsening", "spoilt"):
        assert [file.name for file in made.path(job, node=1).iterdir()] == ["spec.json"]
    assert len(events_of(made.path("full"), "started")[0].data["pids"]) == 4


def test_ranks_of_all_nodes_drop_different_activations(made: Made) -> None:
    checkpoint = made.path("lora with dropout") / "checkpoints" / "step-00000002"
    random = torch.load(checkpoint / "state.pt", weights_only=True)["random"]
    assert len({tuple(state["torch"].tolist()) for state in random}) == 4


def test_the_best_checkpoint_becomes_the_result_on_all_nodes(made: Made) -> None:
    path = made.path("worsening")
    ended = last_event(path)
    assert ended.data["best_step"] < ended.step
    assert same_weights(path / "adapter", path / "checkpoints" / f"step-{ended.data['best_step']:08d}" / "adapter")


def test_all_nodes_go_back_to_a_checkpoint_of_node_0(made: Made) -> None:
    assert train_here(made.folder / "one spoilt", made.spoilt) == EXIT_FINISHED
    got, want = (
        [(e.step, e.data) for e in events_of(run, "warning")]
        for run in (made.path("spoilt"), made.folder / "one spoilt")
    )
    assert got == want
    assert want[0][1]["rolled_back_to"] == 4
    assert find_difference(made.path("spoilt") / "adapter", made.folder / "one spoilt" / "adapter") < WEIGHTS


# Launchers


@dataclass
class Started:
    """The commands of all nodes, as a person would give them."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    @property
    def path(self) -> Path:
        return self.folder / "node-0"

    def wait(self, limit_s: float = 120) -> list[tuple[int, str]]:
        """Of each node the exit code, and what it said in the place of an error."""
        ended = [process.communicate(timeout=limit_s) for process in self.processes]
        return [(process.returncode, said) for process, (_, said) in zip(self.processes, ended, strict=True)]

    def log(self, node: int) -> str:
        return (self.folder / f"node-{node}" / "log.txt").read_text()

    def processes_of(self, node: int) -> list[int]:
        """The launcher and its ranks."""
        (launcher,) = psutil.Process(self.processes[node].pid).children()
        return [launcher.pid, *(rank.pid for rank in launcher.children())]


def command_of(folder: Path, node: int, place: str) -> list[str]:
    spec, run_dir = folder / f"spec-{node}.json", folder / f"node-{node}"
    where = ["--run-dir", str(run_dir), "--node-rank", str(node), "--rendezvous", place]
    return [sys.executable, "-m", "training", "run", str(spec), *where]


@contextmanager
def start(
    folder: Path,
    body: dict[str, Any],
    *,
    nodes: Sequence[int] = (0, 1),
    place: str | None = None,
    before: Sequence[Sequence[str]] = ((), ()),
    **environment: str,
) -> Iterator[Started]:
    """Each node has its own copy of the data; `before` is what its command begins with."""
    place = place or f"127.0.0.1:{find_port()}"
    started = Started(folder, [])
    for node in nodes:
        rows = shutil.copy(body["training_file"], folder / f"rows-{node}.jsonl")
        (folder / f"spec-{node}.json").write_text(json.dumps({**body, "training_file": str(rows)}))
    try:
        for node in nodes:
            command = [*before[node], *command_of(folder, node, place)]
            pipe, env = subprocess.PIPE, {**ENVIRONMENT, **environment}
            env.pop("GLOO_SOCKET_IFNAME")  # each finds its interface
            started.processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env))
        yield started
    finally:
        for process in started.processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.communicate()


@in_test_all
def test_two_hosts_train_from_the_command_line_and_finish(tmp_path: Path) -> None:
    body = make_job(tmp_path, rows=9)
    assert train_here(tmp_path / "one", body) == EXIT_FINISHED
    with start(tmp_path, on_nodes(body, 2, 2, "ddp")) as started:
        assert started.wait() == [(EXIT_FINISHED, "")] * 2
        assert_same_training(started.path, tmp_path / "one")
        assert read_json(started.path / "plan.json")["nodes"] == 2
        assert {file.name for file in (tmp_path / "node-1").iterdir()} == {"spec.json", "log.txt", "lock"}


def test_a_stop_at_node_1_is_one_of_all_and_a_rank_killed_there_is_named(tmp_path: Path) -> None:
    """Between the two the same commands go on from the checkpoint that node 0 wrote."""
    body = on_nodes(make_job(tmp_path, rows=9, hyper=LONG), 2, 2, "ddp")
    with start(tmp_path, body) as started:
        wait_for_step(started.processes[0], 3)
        started.processes[1].send_signal(signal.SIGTERM)
        assert started.wait() == [(EXIT_STOPPED, "")] * 2
        stopped = last_event(started.path)
        assert (stopped.type, stopped.data["reason"]) == ("stopped", "asked by SIGTERM")
    with start(tmp_path, body) as started:
        wait_for_step(started.processes[0], stopped.step + 3)
        begun = events_of(started.path, "started")[-1]
        assert (begun.attempt, begun.data["resumed_from"]) == (2, stopped.step)
        killed = time.monotonic()
        os.kill(begun.data["pids"][1], signal.SIGKILL)
        message = "error: rank 1 (node 1) was killed (SIGKILL); the system does this when memory runs out\n"
        assert started.wait() == [(EXIT_FAILED, message)] * 2
        assert time.monotonic() - killed < 15
        failed = last_event(started.path)
        assert (failed.type, failed.data["code"], failed.data["rank"], failed.data["node"]) == (
            "failed", "rank_died", 1, 1,
        )  # fmt: skip
        assert failed.step >= stopped.step + 3
        assert not any(lives(pid) for pid in pids_of(started.path))


def test_a_node_that_dies_ends_the_others_within_seconds_and_is_named(tmp_path: Path) -> None:
    """Its launcher and its ranks at once, so that none is left that could tell."""
    body = on_nodes(make_job(tmp_path, rows=9, hyper=LONG), 2, 2, "ddp")
    with start(tmp_path, body) as started:
        wait_for_step(started.processes[0], 3)
        killed = time.monotonic()
        for pid in started.processes_of(1):
            os.kill(pid, signal.SIGKILL)
        (code, said), _ = started.wait()
        assert time.monotonic() - killed < 40
        assert (code, said) == (EXIT_FAILED, "error: node 1 (rank 1) is lost: nothing more is heard of it\n")
        failed = last_event(started.path)
        assert (failed.type, failed.data["code"], failed.data["node"]) == ("failed", "node_lost", 1)
        assert (failed.data["fault"], failed.data["retryable"]) == ("infrastructure", True)
        assert not any(lives(pid) for pid in pids_of(started.path))


@in_test_all
def test_where_node_0_dies_the_others_end_and_say_so(tmp_path: Path) -> None:
    body = on_nodes(make_job(tmp_path, rows=9, hyper=LONG), 2, 2, "ddp")
    with start(tmp_path, body) as started:
        wait_for_step(started.processes[0], 3)
        killed = time.monotonic()
        for pid in started.processes_of(0):
            os.kill(pid, signal.SIGKILL)
        _, (code, said) = started.wait()
        assert time.monotonic() - killed < 40
        assert (code, said) == (EXIT_FAILED, "error: node 0 (rank 0) is lost: nothing more is heard of it\n")
        assert started.log(1).endswith(said)
        assert not any(lives(pid) for pid in pids_of(started.path))


def test_a_rank_that_hangs_on_node_1_is_found_out_and_each_log_says_where_its_ranks_stood(tmp_path: Path) -> None:
    body = on_nodes(make_job(tmp_path, rows=9, hyper=LONG), 2, 4, "fsdp")
    with start(tmp_path, body, **{TIMEOUT_SETTING: "15"}) as started:
        wait_for_step(started.processes[0], 3)
        os.kill(pids_of(started.path)[3], signal.SIGSTOP)
        message = "error: rank 3 (node 1) did not answer the others in time; log.txt says where each rank stood\n"
        assert started.wait() == [(EXIT_FAILED, message)] * 2
        for node in range(2):
            assert "most recent call first" in started.log(node)
        assert not any(lives(pid) for pid in pids_of(started.path))


def test_a_node_that_nobody_starts_is_not_waited_for_without_an_end(tmp_path: Path) -> None:
    body, places = on_nodes(make_job(tmp_path, rows=9), 2, 2, "ddp"), [f"127.0.0.1:{find_port()}" for _ in range(2)]
    limit = {MEETING_SETTING: "4"}
    with start(tmp_path, body, nodes=[0], place=places[0], **limit) as first:
        with start(tmp_path, body, nodes=[1], place=places[1], **limit) as second:
            ((code, said),) = second.wait()
            assert code == EXIT_FAILED
            assert said.startswith(f"error: --rendezvous: node 0 does not answer at {places[1]} (Connection refused); ")
        how = f"start it with --node-rank 1 --rendezvous {places[0]}"
        assert first.wait() == [(EXIT_FAILED, f"error: node 1 did not come in time; {how}\n")]
        (failed,) = events_of(first.path)
        assert (failed.type, failed.data["code"], failed.data["retryable"]) == ("failed", "node_missing", True)


def test_nodes_that_were_given_one_run_directory_are_refused(tmp_path: Path) -> None:
    body = on_nodes(make_job(tmp_path, rows=9), 2, 2, "ddp")
    (tmp_path / "node-0").mkdir()
    (tmp_path / "node-1").symlink_to("node-0")
    with start(tmp_path, body) as started:
        for code, said in started.wait():
            assert code == EXIT_FAILED
            assert said.startswith("error: ")
            assert "another process is at work in" in said
            assert said.endswith("and give each node a folder of its own\n")


@pytest.fixture
def two_networks() -> Iterator[list[str]]:
    """The names of two network namespaces, 10.213.7.1 and 10.213.7.2, joined by a cable."""
    names = [f"burnish-{os.getpid()}-{node}" for node in range(2)]
    steps = [
        *(["netns", "add", name] for name in names),
        ["link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1]],
        *(
            ["-n", name, "addr", "add", f"10.213.7.{node + 1}/24", "dev", f"wire{node}"]
            for node, name in enumerate(names)
        ),
        *(["-n", name, "link", "set", f"wire{node}", "up"] for node, name in enumerate(names)),
        *(["-n", name, "link", "set", "lo", "up"] for name in names),
    ]
    try:
        for step in steps:
            try:
                subprocess.run(["ip", *step], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("this system makes no network namespaces")
        yield names
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@in_test_all
def test_hosts_that_are_cut_off_from_each_other_both_end(tmp_path: Path, two_networks: list[str]) -> None:
    """As where one loses its power: no connection is closed. They found each other through their own interfaces."""
    body = on_nodes(make_job(tmp_path, rows=9, hyper=LONG), 2, 2, "ddp")
    before = [["ip", "netns", "exec", name] for name in two_networks]
    with start(tmp_path, body, place="10.213.7.1:29500", before=before, **{SILENCE_SETTING: "5"}) as started:
        wait_for_step(started.processes[0], 3)
        cut = time.monotonic()
        subprocess.run(["ip", "-n", two_networks[1], "link", "set", "wire1", "down"], check=True)
        ended = started.wait()
        assert time.monotonic() - cut < 90
        messages = [f"error: node {other} (rank {other}) is lost: nothing more is heard of it\n" for other in (1, 0)]
        assert ended == [(EXIT_FAILED, message) for message in messages]
        assert last_event(started.path).data["code"] == "node_lost"
        for node in range(2):
            assert "most recent call first" in started.log(node)
        assert not any(lives(pid) for pid in pids_of(started.path))
