"""What a rank exchanges with the others and what it keeps, measured in the process: on PyTorch's own operations and
tensors, and so of whatever library trains."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts the bytes that each collective makes a rank send, where it is made of rings (Patarasuk and Yuan 2009):
    an all-reduce is a reduce-scatter and an all-gather."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes, self._share = 0.0, (ranks - 1) / ranks
        self.seen: dict[str, float] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith(("c10d.", "_c10d_functional.")):
            operation = name.split(".")[1].strip("_")
            largest = max((_bytes_of(part) for part in args), default=0)  # of what goes in and what comes out
            passes = 2 if "allreduce" in operation or "all_reduce" in operation else 1
            moved = 0.0 if "wait" in operation or "barrier" in operation else passes * self._share * largest
            self.bytes += moved
            self.seen[operation] = self.seen.get(operation, 0.0) + moved
        return function(*args, **(kwargs or {}))


def _bytes_of(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))


def count_kept_bytes() -> int:
    """Of all tensors in the process, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and type(thing).__name__ != "DTensor" and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def watching_memory() -> Iterator[dict[str, int]]:
    """Within it, by how much the anonymous memory of the process rose at most: what cannot go back to a file."""
    found = {"begun": _anonymous_bytes(), "most": 0}
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            found["most"] = max(found["most"], _anonymous_bytes() - found["begun"])
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")
