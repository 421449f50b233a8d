"""Checkpoints on nodes that do not share the disk of node 0: it sends them a copy of what they are to read."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from training.errors import StorageError
from training.rank.group import Group
from training.rundir import verify

CHUNK_BYTES = 2**26


def find_place() -> tuple[int, int]:
    """On which node this process is, and of how many."""
    return int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def bring(folder: Path, group: Group, received: Path) -> Path:
    """Where this rank can read a folder of node 0: on the others a copy in `received`, in the place of any earlier one.
    All ranks of the run call it.

    Raises:
        StorageError: a copy is not what was sent.
    """
    node, nodes = find_place()
    if nodes == 1:
        return folder
    files = group.first(lambda: list(_list_files(folder)))
    leaders = range(group.ranks // nodes, group.ranks, group.ranks // nodes)
    own, fault = folder if node == 0 else received / folder.name, None
    if group.rank == 0:
        for name, size in files:
            _send(folder / name, size, leaders)
    elif group.rank in leaders:
        shutil.rmtree(received, ignore_errors=True)
        for name, size in files:
            _receive(own / name, size)
        fault = verify(own)
    for leader, told in enumerate(group.gather(fault)):  # none reads before all is there
        if told is not None:
            raise StorageError(f"the copy of {folder.name} that rank {leader} received is damaged: {told}")
    return own


def _list_files(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.stat().st_size


def _send(path: Path, size: int, leaders: Sequence[int]) -> None:
    with path.open("rb") as file:
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.frombuffer(bytearray(file.read(min(CHUNK_BYTES, size - begin))), dtype=torch.uint8)
            for leader in leaders:
                dist.send(chunk, leader)


def _receive(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            dist.recv(chunk, 0)
            file.write(chunk.numpy().data)
