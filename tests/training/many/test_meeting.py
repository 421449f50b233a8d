"""Launchers that meet: whoever is missing, is not who it should be, or was started for something else is named, on all
nodes and in bounded time."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.training.many.ranks import find_port
from training.errors import BurnishError, CapacityError, RankDiedError, SpecError
from training.node import Node
from training.rank import meeting
from training.rank.ends import Ending, Failure
from training.rank.group import join_group
from training.rank.meeting import meet
from training.rank.nodes import Nodes, Verdict
from training.rundir import MEETING_SETTING, SILENCE_SETTING, TIMEOUT_SETTING

SPEC = {"method": {"type": "supervised"}, "seed": 1}
LEFT = {"step": 3, "failure": {"code": "rank_lost", "message": "another rank is gone"}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEETING_SETTING, "3")
    monkeypatch.setenv(SILENCE_SETTING, "2")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # which meeting would set


def come(
    *nodes: tuple[int, dict[str, Any], BurnishError | None], count: int = 2
) -> list[tuple[Nodes, int] | BurnishError]:
    """Of each who comes, in this order, what it is given or refused."""
    port = find_port()

    def work(place: int) -> tuple[Nodes, int] | BurnishError:
        rank, spec, refusal = nodes[place]
        time.sleep(0.3 * place)
        try:
            return meet(Node(rank, "127.0.0.1", port), count, spec, 7 if rank == 0 else 1, refusal)
        except BurnishError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(work, range(len(nodes))))


def refuse(call: Callable[[], object]) -> BurnishError:
    with pytest.raises(BurnishError) as refused:
        call()
    return refused.value


def met(*found: tuple[Nodes, int] | BurnishError) -> list[Nodes]:
    return [one[0] for one in found if isinstance(one, tuple)]


def test_all_take_the_attempt_of_node_0_in_whatever_order_they_come() -> None:
    found = come((2, SPEC, None), (0, SPEC, None), (1, SPEC, None), count=3)
    assert [one[1] for one in found if isinstance(one, tuple)] == [7, 7, 7]


def test_another_spec_is_named_by_its_field_on_both() -> None:
    for error in come((0, SPEC, None), (1, {**SPEC, "seed": 2}, None)):
        assert isinstance(error, BurnishError)
        assert error.message == "seed: node 1 was started with another spec than node 0; give all nodes the same"
        assert (error.param, error.fault, error.retryable) == ("seed", "config", False)


def test_what_keeps_one_host_from_taking_part_all_are_told() -> None:
    no_gpu = SpecError("resources.gpus: 4 asked, this host has 0", param="resources.gpus", code="no_such_device")
    for error in come((0, SPEC, None), (1, SPEC, no_gpu)):
        assert isinstance(error, BurnishError)
        assert (error.message, error.code) == ("node 1: resources.gpus: 4 asked, this host has 0", "no_such_device")
    for error in come((1, SPEC, None), (0, SPEC, CapacityError("no room"))):
        assert isinstance(error, BurnishError)
        assert (error.message, error.fault) == ("no room", "capacity")


def test_a_node_that_does_not_come_is_named_to_those_who_did() -> None:
    first, second = come((0, SPEC, None), (2, SPEC, None), count=3)
    for error in (first, second):
        assert isinstance(error, BurnishError)
        assert (error.code, error.retryable) == ("node_missing", True)
        assert error.message.startswith("node 1 did not come in time; start it with --node-rank 1 --rendezvous 127.")


def test_a_second_node_of_the_same_rank_is_sent_away() -> None:
    first, _, third = come((0, SPEC, None), (1, SPEC, None), (1, SPEC, None), count=3)
    assert isinstance(third, SpecError)
    assert third.message.startswith("--node-rank: node 1 has come already, as process ")
    assert isinstance(first, BurnishError)
    assert first.message.startswith("node 2 did not come")


def test_what_listens_there_and_is_no_node_0_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, of which the store itself would wait without an end, and one that hangs up."""
    monkeypatch.setattr(meeting, "STORE_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as rude:

        def hang_up() -> None:
            while True:
                try:
                    rude.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        for server in (silent, rude):
            port = server.getsockname()[1]
            error = refuse(lambda port=port: meet(Node(1, "127.0.0.1", port), 2, SPEC, 1, None))  # type: ignore[misc]
            assert f"what answers at 127.0.0.1:{port} is not node 0 of a run" in error.message
        taken = refuse(lambda: meet(Node(0, "127.0.0.1", rude.getsockname()[1]), 2, SPEC, 1, None))
        assert "of this host is taken; name another, on all nodes" in taken.message
        rude.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            Node(0, "192.0.2.1", 29500),
            "--rendezvous: 192.0.2.1 is no address of this host, which is node 0; name one of",
        ),
        (Node(1, "no.such.host.invalid", 29500), "node 0 does not answer at no.such.host.invalid:29500"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(node: Node, words: str) -> None:
    assert words in refuse(lambda: meet(node, 2, SPEC, 1, None)).message


def test_an_address_that_is_not_this_host_s_is_named_to_all() -> None:
    port = find_port()
    with ThreadPoolExecutor(2) as pool:
        made = [Node(0, "127.0.0.1", port), Node(1, "127.0.0.1", port, local_addr="192.0.2.1")]
        calls = [pool.submit(meet, node, 2, SPEC, 1, None) for node in made]
        for call in calls:
            assert "--local-addr: 192.0.2.1 is no address of this host" in refuse(call.result).message


def test_a_name_that_is_another_host_to_each_is_found_out() -> None:
    """As 127.0.1.1, which stands beside a host's own name in many of their files."""
    own, theirs = ({"spec": SPEC, "address": address, "refusal": None} for address in ("127.0.1.1", "10.0.0.2"))
    told = meeting.find_fault(1, theirs, own)
    assert told is not None
    assert "to itself node 0 is 127.0.1.1, and node 1 is 10.0.0.2" in told["message"]


def test_how_it_ended_is_known_to_all_and_times_are_of_one_clock() -> None:
    first, second = met(*come((0, SPEC, None), (1, SPEC, None)))
    for node in (first, second):
        node.watch(lambda: 0)
    failed = Ending(1, {1: Failure(-9, time.time() - 5, LEFT)})
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(second.hear, failed)
        endings, lost = first.collect(Ending(0, {}))
        first.tell(Verdict(1, "rank 1 was killed"), [1])
        assert heard.result() == Verdict(1, "rank 1 was killed")
    assert lost == []
    assert endings[1].failures[1].told == LEFT
    assert abs(time.time() - 5 - endings[1].failures[1].at) < 3


def test_a_node_of_which_nothing_more_is_heard_is_lost() -> None:
    first, _ = met(*come((0, SPEC, None), (1, SPEC, None)))
    first.watch(lambda: 0)  # and the other never says a word
    begun = time.monotonic()
    assert first.collect(Ending(0, {}))[1] == [1]
    assert 1 < time.monotonic() - begun < 20
    first.tell(Verdict(1, "node 1 is lost"), [])


def test_refusals_keep_what_they_are() -> None:
    error = RankDiedError("gone", code="node_missing")
    assert meeting.as_error(error.as_dict()).as_dict() == error.as_dict()


def test_groups_that_libraries_make_among_ranks_wait_no_longer_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own default is half an hour, whatever the whole was given; so are DeepSpeed's."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
    monkeypatch.setenv(TIMEOUT_SETTING, "77")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        join_group(2, "cpu")
        made = dist.new_group([0])
        assert made._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()
