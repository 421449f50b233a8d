"""The launchers of a run on several hosts hear of each other, for as long as it goes on, in the store at which they met
(meeting.py): when the ranks of one end, or nothing is heard of it any more, those of all end.

Node 0, which hosts the store, watches all others; these watch node 0. Ages are by the clock of whoever looks.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from torch.distributed import TCPStore

from training.errors import BurnishError
from training.node import Node
from training.rank.ends import Ending

BEAT_S = 1.0
LOOK_S = 0.2
GRACE_S = 15.0
"""What ranks have to end by themselves, once those of another node did, before they are killed."""
STACKS_S = 2.0
"""And what they have to write where they stand."""
QUICK_S = 10.0
"""How long others are waited for that have nothing more to do than to answer."""
LAST_S = 60.0
"""What an ending may take in all, beside."""


@dataclass(frozen=True)
class Verdict:
    """How the run ended: its exit code, and the message where it failed."""

    code: int
    message: str | None


class Nodes:
    """The other nodes of a run. `open_store` gives the thread that watches them a client of its own."""

    def __init__(
        self, node: Node, nodes: int, store: TCPStore, open_store: Callable[[], TCPStore], silence_s: float
    ) -> None:
        self.node, self.count, self.silence_s = node, nodes, silence_s
        self.watched = list(range(1, nodes)) if node.rank == 0 else [0]
        self._store, self._open_store = store, open_store
        self._heard = dict.fromkeys(self.watched, time.monotonic())
        self._beats: dict[int, bytes] = {}
        self._alarm: str | None = None
        self._over, self._closed = threading.Event(), threading.Event()

    def watch(self, give_up: Callable[[], int]) -> None:
        """From now on, on threads of their own. Where an ending takes far too long the process is left with the exit
        code that `give_up` gives."""
        threading.Thread(target=self._exchange, daemon=True).start()
        threading.Thread(target=self._look_out, args=[give_up], daemon=True).start()

    def collect(self, own: Ending) -> tuple[list[Ending], list[int]]:
        """On node 0, where no rank is left: how the ranks of all nodes ended, and which nodes are lost. Others are told
        to end theirs."""
        self._alarm = self._alarm or "the ranks of node 0 have ended"
        self._over.set()
        endings, waiting, deadline = [own], set(self.watched), time.monotonic() + GRACE_S + LAST_S
        while waiting and time.monotonic() < deadline:
            for node in sorted(waiting):
                if self._store.check([f"end/{node}"]):
                    endings.append(Ending.from_dict(self._read(f"end/{node}"), time.time()))
                    waiting.remove(node)
            if all(self._silent_s(node) > min(self.silence_s, QUICK_S) for node in waiting):
                break
            time.sleep(LOOK_S)
        return endings, sorted(waiting)

    def tell(self, verdict: Verdict, nodes: Sequence[int]) -> None:
        """On node 0, which hosts the store: to be heard before it goes."""
        self._store.set("verdict", json.dumps([verdict.code, verdict.message]))
        self._wait_for([f"heard/{node}" for node in nodes], QUICK_S)
        self._closed.set()

    def hear(self, own: Ending) -> Verdict | None:
        """On the others, where no rank is left; None where node 0 is lost."""
        self._over.set()
        try:
            if not self._is_silent():
                self._store.set(f"end/{self.node.rank}", json.dumps(own.as_dict(time.time())))
            if not self._wait_for(["verdict"], GRACE_S + 2 * LAST_S):
                return None
            verdict = Verdict(*self._read("verdict"))
            self._store.set(f"heard/{self.node.rank}", "")
        except RuntimeError:  # of a store that is gone
            return None
        finally:
            self._closed.set()
        return verdict

    def _wait_for(self, keys: list[str], limit_s: float) -> bool:
        """Whether they came in time, and before all who might set them were silent."""
        deadline = time.monotonic() + limit_s
        while not self._is_silent():
            if self._store.check(keys):
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        return False

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))

    def _is_silent(self) -> bool:
        return all(self._silent_s(node) > self.silence_s for node in self.watched)

    def _silent_s(self, node: int) -> float:
        return time.monotonic() - self._heard[node]

    def _exchange(self) -> None:
        """A store that does not answer holds up this thread alone."""
        try:
            store = self._open_store()
            for beat in itertools.count():
                store.set(f"beat/{self.node.rank}", str(beat))
                if self.node.rank == 0:
                    self._hear_others(store)
                else:
                    self._heard[0] = time.monotonic()
                    if store.check(["alarm"]):
                        self._alarm = store.get("alarm").decode()
                if self._closed.wait(BEAT_S):
                    return
        except (RuntimeError, BurnishError):
            self._heard[0] = -float("inf")

    def _hear_others(self, store: TCPStore) -> None:
        for node in self.watched:
            beat = store.get(f"beat/{node}")
            if beat != self._beats.get(node):
                self._beats[node], self._heard[node] = beat, time.monotonic()
            if store.check([f"end/{node}"]):
                self._alarm = self._alarm or f"the ranks of node {node} have ended"
        if self._alarm is not None:
            store.set("alarm", self._alarm)

    def _look_out(self, give_up: Callable[[], int]) -> None:
        while self._alarm is None and not self._over.wait(LOOK_S):
            for node in self.watched:
                if self._silent_s(node) > self.silence_s:
                    self._alarm = f"nothing is heard of node {node}"
        if not self._over.wait(GRACE_S):
            end_ranks(self._alarm or "")
        if not self._closed.wait(GRACE_S + 3 * LAST_S):
            os._exit(give_up())


def end_ranks(why: str) -> None:
    """Kill those of this host, which are the children of this process. First each writes where it stands."""
    print(f"{why}: the ranks of this node are killed", file=sys.stderr, flush=True)
    for number, wait_s in ((signal.SIGUSR1, STACKS_S), (signal.SIGKILL, 0.0)):
        for rank in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        time.sleep(wait_s)
