"""The addresses of this host: where a store listens, and which interface gloo and NCCL use."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

__all__ = ["bind_communication", "listeners", "reachable_addresses"]

LOOPBACK = "127.0.0.1"


def reachable_addresses(name: str | None = None) -> list[str]:
    """The addresses at which other hosts may reach this host, those of its `name` first."""
    named = []
    with suppress(socket.gaierror):  # a node whose name does not resolve still has interfaces
        infos = socket.getaddrinfo(name or socket.gethostname(), None, type=socket.SOCK_STREAM)
        named = [str(info[4][0]) for info in infos]
    interfaces = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [a for a in named if a in interfaces] + sorted(interfaces, key=lambda a: ":" in a)
    parsed = [(text, ipaddress.ip_address(text)) for text in dict.fromkeys(usable)]
    return [text for text, ip in parsed if not ip.is_loopback and not (ip.version == 6 and ip.is_link_local)]


def own_addresses(name: str) -> list[str]:
    """The address of `name` if it is this host's; else all addresses at which this host can be reached."""
    with suppress(OSError):
        address = socket.gethostbyname(name)
        if address in reachable_addresses():
            return [address]
    return reachable_addresses(name)


def hosts_of(name: str) -> list[str]:
    """How a rank reaches the host `name`: by that name, or by its own addresses where `name` means loopback."""
    with suppress(OSError):
        if ipaddress.ip_address(socket.gethostbyname(name)).is_loopback:
            return own_addresses(name)
    return [name]


def listeners(hosts: Iterable[str], port: int = 0) -> list[socket.socket]:
    """A listening socket on each of `hosts` where this is possible; port 0 is any free port.

    OSError if it is possible on none, or if the port is taken on any: ranks would find two programs there.
    """
    sockets: list[socket.socket] = []
    last: OSError = OSError("this host has no address that others can reach")
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sockets.append(socket.create_server((host, port), family=family, backlog=1024))
        except OSError as error:
            last = error
            if error.errno == errno.EADDRINUSE:
                break
    else:
        if sockets:
            return sockets
    for listener in sockets:
        listener.close()
    raise last


def bind_communication(address: str) -> None:
    """Let gloo, and NCCL if all ranks share a node, listen on the interface of `address` unless the user chose one.

    By default gloo takes the address of the host's name, which may be on another network, or on one open to everybody.
    """
    names = [name for name, held in psutil.net_if_addrs().items() if any(entry.address == address for entry in held)]
    if not names:
        return
    interface = names[0]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ipaddress.ip_address(address).is_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
