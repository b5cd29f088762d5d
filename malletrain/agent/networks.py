"""The networks of this node: its interfaces with address and speed, and the address that reaches
the daemon.

Asks only the kernel, and sends nothing. :mod:`malletrain.core.fabric` decides which network a job
uses.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from malletrain.protocol.payloads import NodeNetwork

MAX_NETWORKS = 64
"""Maximum number of networks that are reported."""
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCETHTOOL = 0x8913, 0x8915, 0x891B, 0x8946
_ETHTOOL_GSET = 1
_COMMAND = struct.Struct("IIIHBBBBBBIIHBBIII")
"""struct ethtool_cmd, in which the speed is in two halves."""
_SPEED, _SPEED_HIGH = 3, 12
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_GLOBAL = "00"
"""Scope of globally valid addresses in /proc/net/if_inet6."""
_UNKNOWN = 1 << 31


def networks() -> tuple[NodeNetwork, ...]:
    """Returns the networks by which other nodes may reach this node, and the loopback last."""
    networks_: list[NodeNetwork] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = _flags(probe, name)
            if flags & _UP and flags & _RUNNING:
                mbit = 0 if flags & _LOOPBACK else _speed(probe, name)
                networks_ += [
                    NodeNetwork(name, address, bits, mbit)
                    for address, bits in _addresses(probe, name)
                ]
    outside = [n for n in networks_ if not ipaddress.ip_address(n.address).is_loopback]
    return tuple([*outside, *(n for n in networks_ if n not in outside)][:MAX_NETWORKS])


def address_to(endpoint: str) -> str:
    """Returns the address from which this node reaches the daemon; empty if there is no route.

    Args:
        endpoint: ``tcp://HOST:PORT``.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        for family, kind, proto, _, socket_address in infos:
            with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.connect(socket_address)
                return str(probe.getsockname()[0])
    except (OSError, ValueError):
        pass
    return ""


def interface_of(address: str, among: tuple[NodeNetwork, ...]) -> str:
    """Returns the interface with ``address``; empty if there is none."""
    return next((n.interface for n in among if n.address == address), "")


def _ioctl(socket_: socket.socket, operation: int, name: str) -> bytes:
    request = struct.pack("16s24x", name.encode())
    return fcntl.ioctl(socket_.fileno(), operation, request)


def _flags(socket_: socket.socket, name: str) -> int:
    try:
        return int(struct.unpack_from("H", _ioctl(socket_, _SIOCGIFFLAGS, name), 16)[0])
    except OSError:  # the interface no longer exists
        return 0


def _addresses(socket_: socket.socket, name: str) -> list[tuple[str, int]]:
    """Returns (address, bits of the network) of an interface: its first IPv4 address, and all its
    IPv6 addresses.
    """
    addresses = []
    try:
        address = socket.inet_ntoa(_ioctl(socket_, _SIOCGIFADDR, name)[20:24])
        mask = _ioctl(socket_, _SIOCGIFNETMASK, name)[20:24]
        addresses.append((address, int.from_bytes(mask, "big").bit_count()))
    except OSError:
        pass  # it has no IPv4 address
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, _, bits, scope, _, interface = line.split()
            if interface == name and scope == _GLOBAL:
                addresses.append((str(ipaddress.IPv6Address(int(number, 16))), int(bits, 16)))
    return addresses


def _speed(socket_: socket.socket, name: str) -> int:
    """Returns the speed of an interface, Mbit/s; 0 if the driver does not know it."""
    command = array.array("B", _COMMAND.pack(_ETHTOOL_GSET, *[0] * 17))
    address, _ = command.buffer_info()
    try:
        request = struct.pack("16sP16x", name.encode(), address)
        fcntl.ioctl(socket_.fileno(), _SIOCETHTOOL, request)
        settings = _COMMAND.unpack(command)
        speed = int(settings[_SPEED] | settings[_SPEED_HIGH] << 16)
    except OSError:
        speed = 0
    return max(0 if speed >= _UNKNOWN else speed, _infiniband(name))


def _infiniband(name: str) -> int:
    """Returns the speed of the port of an IP-over-InfiniBand interface, Mbit/s; 0 for others."""
    rates = Path(f"/sys/class/net/{name}/device").glob("infiniband/*/ports/*/rate")
    max_mbit = 0
    for rate in rates:  # such as "100 Gb/sec (4X EDR)"
        with contextlib.suppress(OSError, ValueError):
            max_mbit = max(max_mbit, int(float(rate.read_text().split()[0]) * 1000))
    return max_mbit
