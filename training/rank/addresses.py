"""By which address and interface a host reaches the others of a run."""

import ipaddress
import os
import socket

import psutil

from training.errors import SpecError
from training.node import LOCAL_ADDR, RENDEZVOUS, Node


def find_address(node: Node) -> str:
    """Of this host: that from which it reaches node 0, unless it is named.

    Raises:
        SpecError: there is none.
    """
    name, param = (node.host, RENDEZVOUS) if node.local_addr is None else (node.local_addr, LOCAL_ADDR)
    try:
        family, place = _resolve(name, node.port)
        if node.local_addr is not None:
            return str(place[0])
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as bad:
        raise SpecError(f"{param}: this host finds no way to {name} ({bad.strerror or bad})") from None


def require_own(node: Node) -> None:
    """Raises SpecError on node 0 where the place to meet is not on this host."""
    try:
        family, place = _resolve(node.host, 0)
        with socket.socket(family) as probe:
            probe.bind(place)
    except OSError:
        message = f"{RENDEZVOUS}: {node.host} is no address of this host, which is node 0"
        raise SpecError(f"{message}; name one of {_list_addresses()}") from None


def use_interface(address: str) -> None:
    """Let the ranks of this host reach the others through the interface of an address, unless the environment names
    one.

    Raises:
        SpecError: no interface has it.
    """
    interface = _find_interface(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # and none whose name begins so


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _resolve(name: str, port: int) -> tuple[int, tuple[object, ...]]:
    family, _, _, _, place = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    return family, place


def _find_interface(address: str) -> str:
    listed = _list_interfaces()
    for own, name in listed.items():
        # Of loopback addresses a host has more than it lists.
        if own == address or (is_loopback(own) and is_loopback(address)):
            return name
    raise SpecError(f"{LOCAL_ADDR}: {address} is no address of this host, which has {_list_addresses()}")


def _list_interfaces() -> dict[str, str]:
    """By their addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        one.address.partition("%")[0]: name
        for name, own in psutil.net_if_addrs().items()
        for one in own
        if one.family in families
    }


def _list_addresses() -> str:
    return ", ".join(_list_interfaces())
