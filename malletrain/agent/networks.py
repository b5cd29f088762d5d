"""The networks of this node: its interfaces with address and speed, and the one that reaches the
daemon.

Asks only the kernel and sends nothing. :mod:`malletrain.core.fabric` decides which network a job
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

MOST = 64
"""Networks that are told of."""
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCETHTOOL = 0x8913, 0x8915, 0x891B, 0x8946
_ETHTOOL_GSET = 1
_COMMAND = struct.Struct("IIIHBBBBBBIIHBBIII")
"""struct ethtool_cmd; its speed is in two halves."""
_SPEED, _SPEED_HIGH = 3, 12
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_GLOBAL = "00"
"""Scope of addresses that are good beyond their link, in /proc/net/if_inet6."""
_UNKNOWN = 1 << 31


def networks() -> tuple[NodeNetwork, ...]:
    """Those by which other nodes may reach this one, and the loopback last."""
    networks_: list[NodeNetwork] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = _flags(probe, name)
            if flags & _UP and flags & _RUNNING:
                mbit = 0 if flags & _LOOPBACK else _speed(probe, name)
                networks_ += [NodeNetwork(name, *place, mbit) for place in _addresses(probe, name)]
    outside = [n for n in networks_ if not ipaddress.ip_address(n.address).is_loopback]
    return tuple([*outside, *(n for n in networks_ if n not in outside)][:MOST])


def address_to(endpoint: str) -> str:
    """The address from which this node reaches the daemon; empty: there is no way.

    Args:
        endpoint: ``tcp://HOST:PORT``.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        for family, kind, proto, _, where in infos:
            with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    except (OSError, ValueError):
        pass
    return ""


def interface_of(address: str, among: tuple[NodeNetwork, ...]) -> str:
    """The interface that has ``address``; empty: none has."""
    return next((n.interface for n in among if n.address == address), "")


def _ioctl(socket_: socket.socket, what: int, name: str) -> bytes:
    request = struct.pack("16s24x", name.encode())
    return fcntl.ioctl(socket_.fileno(), what, request)


def _flags(socket_: socket.socket, name: str) -> int:
    try:
        return int(struct.unpack_from("H", _ioctl(socket_, _SIOCGIFFLAGS, name), 16)[0])
    except OSError:  # it is gone
        return 0


def _addresses(socket_: socket.socket, name: str) -> list[tuple[str, int]]:
    """(address, bits of the network) of an interface: its first of IPv4, those of IPv6."""
    addresses = []
    try:
        address = socket.inet_ntoa(_ioctl(socket_, _SIOCGIFADDR, name)[20:24])
        mask = _ioctl(socket_, _SIOCGIFNETMASK, name)[20:24]
        addresses.append((address, int.from_bytes(mask, "big").bit_count()))
    except OSError:
        pass  # it has none
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, _, bits, scope, _, of = line.split()
            if of == name and scope == _GLOBAL:
                addresses.append((str(ipaddress.IPv6Address(int(number, 16))), int(bits, 16)))
    return addresses


def _speed(socket_: socket.socket, name: str) -> int:
    """Mbit/s; 0 where the driver does not know."""
    command = array.array("B", _COMMAND.pack(_ETHTOOL_GSET, *[0] * 17))
    place, _ = command.buffer_info()
    try:
        request = struct.pack("16sP16x", name.encode(), place)
        fcntl.ioctl(socket_.fileno(), _SIOCETHTOOL, request)
        settings = _COMMAND.unpack(command)
        speed = int(settings[_SPEED] | settings[_SPEED_HIGH] << 16)
    except OSError:
        speed = 0
    return max(0 if speed >= _UNKNOWN else speed, _infiniband(name))


def _infiniband(name: str) -> int:
    """Mbit/s of the port behind an interface of IP over InfiniBand; 0 for others."""
    rates = Path(f"/sys/class/net/{name}/device").glob("infiniband/*/ports/*/rate")
    fastest = 0
    for rate in rates:  # such as "100 Gb/sec (4X EDR)"
        with contextlib.suppress(OSError, ValueError):
            fastest = max(fastest, int(float(rate.read_text().split()[0]) * 1000))
    return fastest
