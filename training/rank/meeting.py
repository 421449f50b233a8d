"""Where the launchers of a run on several hosts meet before a rank is started: each says what it was started for, and
node 0, which hosts the store, whether they go together."""

import json
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from torch.distributed import TCPStore

from training.errors import BurnishError, RankDiedError, SpecError
from training.node import LOCAL_ADDR, RANK, RENDEZVOUS, Node
from training.rank.addresses import find_address, is_loopback, require_own, use_interface
from training.rank.nodes import LOOK_S, QUICK_S, Nodes
from training.rundir import MEETING_SETTING, MEETING_TIMEOUT_S, SILENCE_SETTING, SILENCE_TIMEOUT_S

STORE_S = 60.0
"""What one who has met waits for an answer of the store."""


def meet(node: Node, nodes: int, spec: dict[str, Any], attempt: int, refusal: BurnishError | None) -> tuple[Nodes, int]:
    """The others, and the number of the attempt, which is node 0's to say.

    `spec` is what has to be the same on all nodes. With a `refusal` this host cannot take part, and all raise it.

    Raises:
        BurnishError: a node did not come in time, or they do not go together.
    """
    deadline = time.monotonic() + float(os.environ.get(MEETING_SETTING, MEETING_TIMEOUT_S))
    if node.rank == 0:
        store = _host(node)
    else:
        _wait_for_port(node, deadline)
        store = _open(node, STORE_S)
    address = None
    try:
        address = find_address(node)
        use_interface(address)
    except SpecError as error:
        refusal = refusal or error
    try:
        own = {"spec": spec, "address": address, "refusal": refusal and refusal.as_dict()}
        _come(node, store, own)
        if node.rank == 0:
            begin = _call_roll(node, nodes, store, own, attempt, deadline)
        else:
            begin = _wait_for_begin(store, deadline)
            store.set(f"left/{node.rank}", "")
        if node.rank == 0 and begin["refusal"]:  # which those who came are to hear before the store goes
            here = [other for other in range(1, nodes) if store.check([f"here/{other}"])]
            _wait(store, [f"left/{other}" for other in here], time.monotonic() + QUICK_S)
    except RuntimeError:  # of a store that is gone
        raise RankDiedError("node 0 is gone before the run began; its log.txt says why", code="node_lost") from None
    if begin["refusal"]:
        raise as_error(begin["refusal"])
    silence_s = float(os.environ.get(SILENCE_SETTING, SILENCE_TIMEOUT_S))
    return Nodes(node, nodes, store, partial(_open, node, QUICK_S), silence_s), begin["attempt"]


def _come(node: Node, store: TCPStore, own: dict[str, Any]) -> None:
    """Raises SpecError where another has come as this node."""
    store.set(f"beat/{node.rank}", "")
    told = json.dumps({**own, "id": str(uuid4()), "who": f"process {os.getpid()} on {socket.gethostname()}"})
    there = store.compare_set(f"here/{node.rank}", "", told).decode()
    if there != told:
        raise SpecError(f"{RANK}: node {node.rank} has come already, as {json.loads(there)['who']}; take another")


def _call_roll(
    node: Node, nodes: int, store: TCPStore, own: dict[str, Any], attempt: int, deadline: float
) -> dict[str, Any]:
    """What node 0 tells all: the attempt, or why there is none."""
    refusal = own["refusal"]
    for other in range(1, nodes):
        if refusal is not None:
            break
        if _wait(store, [f"here/{other}"], deadline):
            refusal = find_fault(other, json.loads(store.get(f"here/{other}")), own)
        else:
            message = f"node {other} did not come in time; start it with {RANK} {other} {RENDEZVOUS} {node.place}"
            refusal = RankDiedError(message, code="node_missing").as_dict()
    begin = {"attempt": attempt, "refusal": refusal}
    store.set("begin", json.dumps(begin))
    return begin


def find_fault(other: int, theirs: dict[str, Any], own: dict[str, Any]) -> dict[str, Any] | None:
    """Why a node cannot take part."""
    if refused := theirs["refusal"]:
        return {**refused, "message": f"node {other}: {refused['message']}"}
    differing = [name for name in own["spec"] | theirs["spec"] if own["spec"].get(name) != theirs["spec"].get(name)]
    if differing:
        message = f"{differing[0]}: node {other} was started with another spec than node 0; give all nodes the same"
        return SpecError(message, param=differing[0]).as_dict()
    if is_loopback(own["address"]) != is_loopback(theirs["address"]):
        message = (
            f"{RENDEZVOUS}: to itself node 0 is {own['address']}, and node {other} is {theirs['address']}; name an "
            f"address of node 0 in the network of both, there or in {LOCAL_ADDR}"
        )
        return SpecError(message).as_dict()
    return None


def _wait_for_begin(store: TCPStore, deadline: float) -> dict[str, Any]:
    if not _wait(store, ["begin"], deadline + STORE_S):
        raise RankDiedError("node 0 did not say in time whether all nodes have come", code="node_missing")
    begin: dict[str, Any] = json.loads(store.get("begin"))
    return begin


def _wait(store: TCPStore, keys: list[str], deadline: float) -> bool:
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _host(node: Node) -> TCPStore:
    require_own(node)
    try:
        return TCPStore(
            node.host,
            node.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_S),
            multi_tenant=True,  # torchrun's own store is the same one
        )
    except RuntimeError as bad:
        reason = "is taken" if "EADDRINUSE" in str(bad) else f"cannot be listened at ({str(bad).splitlines()[0]})"
        raise SpecError(f"{RENDEZVOUS}: port {node.port} of this host {reason}; name another, on all nodes") from None


def _wait_for_port(node: Node, deadline: float) -> None:
    """Until node 0 listens."""
    while True:
        try:
            socket.create_connection((node.host, node.port), timeout=QUICK_S).close()
        except OSError as bad:
            if time.monotonic() > deadline:
                reason = f"node 0 does not answer at {node.place} ({bad.strerror or bad})"
                message = f"{RENDEZVOUS}: {reason}; start it, and see that the port is the same and open"
                raise RankDiedError(message, code="node_missing") from None
            time.sleep(LOOK_S)
        else:
            return


def _open(node: Node, limit_s: float) -> TCPStore:
    """On a thread of its own: something else that listens there, and says nothing, would be waited for without an
    end."""
    opened: list[TCPStore] = []

    def work() -> None:
        timeout = timedelta(seconds=STORE_S)
        try:
            opened.append(TCPStore(node.host, node.port, wait_for_workers=False, timeout=timeout))
        except RuntimeError as bad:
            print(bad, flush=True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not opened:
        message = f"{RENDEZVOUS}: what answers at {node.place} is not node 0 of a run; name its address and port"
        raise RankDiedError(message, code="node_missing")
    return opened[0]


def as_error(told: dict[str, Any]) -> BurnishError:
    error = BurnishError(told["message"], param=told["param"], code=told["code"])
    error.fault, error.retryable = told["fault"], told["retryable"]
    return error
