"""Which of several hosts this one is in a run, and where they meet."""

import argparse
import re
from dataclasses import dataclass

from training.devices import Layout
from training.errors import SpecError

RANK, RENDEZVOUS, LOCAL_ADDR = "--node-rank", "--rendezvous", "--local-addr"


@dataclass(frozen=True)
class Node:
    rank: int
    host: str
    "A name or address of node 0, by which all nodes reach it."
    port: int
    local_addr: str | None = None
    "An address of this node, by which the others reach it; None is that from which it reaches node 0."

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def as_arguments(self) -> list[str]:
        own = [] if self.local_addr is None else [LOCAL_ADDR, self.local_addr]
        return [RANK, str(self.rank), RENDEZVOUS, self.place, *own]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(RANK, type=int, help="which of resources.nodes this host is, from 0; 0 writes the run")
    parser.add_argument(RENDEZVOUS, metavar="HOST:PORT", help="where the nodes meet: an address of node 0, a free port")
    parser.add_argument(LOCAL_ADDR, help="an address of this host in the network of the nodes, where it has several")


def find_node(asked: argparse.Namespace, layout: Layout) -> Node | None:
    """What the command line says of it; None for a run on one host.

    Raises:
        SpecError: it does not go together with `resources.nodes`.
    """
    given = {RANK: asked.node_rank, RENDEZVOUS: asked.rendezvous, LOCAL_ADDR: asked.local_addr}
    nodes = layout.nodes
    if nodes == 1:
        for name in (name for name, value in given.items() if value is not None):
            raise SpecError(f"{name}: resources.nodes of the spec is 1; leave it out, or set that to 2 or more")
        return None
    for name in (RANK, RENDEZVOUS):
        if given[name] is None:
            message = (
                f"resources.nodes: the run is on {nodes} hosts; start it on each, with {RANK} 0 to {nodes - 1} "
                f"and {RENDEZVOUS} HOST:PORT, an address of node 0"
            )
            raise SpecError(message, param="resources.nodes")
    if not 0 <= asked.node_rank < nodes:
        raise SpecError(f"{RANK}: {asked.node_rank} is not one of 0 to {nodes - 1}, as resources.nodes is {nodes}")
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+)):(\d{1,5})", asked.rendezvous)
    if found is None or not 0 < int(found[3]) < 2**16:
        raise SpecError(f'{RENDEZVOUS}: "{asked.rendezvous}" is not HOST:PORT, such as 10.0.0.1:29500')
    return Node(asked.node_rank, found[1] or found[2], int(found[3]), asked.local_addr)
