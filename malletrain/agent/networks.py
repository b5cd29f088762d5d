"""The networks of this node, and tests of the connection to other nodes.

:func:`networks` and :func:`address_to` find the interfaces of this node with address and speed, and
the address that reaches the daemon. They ask only the kernel, and send nothing.
:mod:`malletrain.core.fabric` decides which network a job uses.

:class:`Prober` tests at the daemon's request whether a connection to other nodes is possible, and
its throughput. The listener accepts only a token, and then bytes that it counts. It closes after
OPEN_S. The daemon decides which nodes connect and what follows.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import hmac
import ipaddress
import logging
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from malletrain.protocol.messages import (
    Message,
    Probed,
    ProbeOpen,
    ProbeTo,
    ProbeUp,
)
from malletrain.protocol.payloads import NodeNetwork, ProbeResult, ProbeTarget
from malletrain.waits import time_limit

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
    """Return the networks by which other nodes may reach this node, and the loopback last."""
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
    """Return the address from which this node reaches the daemon; empty if there is no route.

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
    """Return the interface with ``address``; empty if there is none."""
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
    """Return (address, bits of the network) of an interface: its first IPv4 address, and all its
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
    """Return the speed of an interface, Mbit/s; 0 if the driver does not know it."""
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
    """Return the speed of the port of an IP-over-InfiniBand interface, Mbit/s; 0 for others."""
    rates = Path(f"/sys/class/net/{name}/device").glob("infiniband/*/ports/*/rate")
    max_mbit = 0
    for rate in rates:  # such as "100 Gb/sec (4X EDR)"
        with contextlib.suppress(OSError, ValueError):
            max_mbit = max(max_mbit, int(float(rate.read_text().split()[0]) * 1000))
    return max_mbit


CONNECT_S = 3.0
OPEN_S = 20.0
MAX_TRIAL_S = 2.0
"""Maximum duration of a trial, seconds, even if the daemon asks for more."""
_CHUNK = bytes(1 << 20)
_MAX_UNSENT_BYTES = 1 << 20
"""Maximum size of the send queue, so that a trial does not occupy a slow network for long."""
_ANSWER_BYTES = 8

log = logging.getLogger("malletrain.agent")


class Prober:
    """The trials of one agent. ``send``: sends a message to the daemon."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, message: ProbeOpen | ProbeTo) -> None:
        """Open a listener or start trials, as the daemon requests."""
        work = self._open(message) if isinstance(message, ProbeOpen) else self._try(message)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all listeners and trials."""
        for task in self._tasks:
            task.cancel()

    async def _open(self, message: ProbeOpen) -> None:
        token = bytes.fromhex(message.token)

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with time_limit(OPEN_S):
                    await _count_bytes(reader, writer, token)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                pass  # the peer does not know the token, has disconnected or is silent
            finally:
                writer.close()

        try:
            server = await asyncio.start_server(count, message.address or None, 0, limit=1 << 21)
        except OSError as error:
            log.warning("cannot listen at %s for a trial: %s", message.address, error)
            return
        try:
            self._send(ProbeUp(message.number, server.sockets[0].getsockname()[1]))
            await asyncio.sleep(OPEN_S)
        finally:
            server.close()

    async def _try(self, message: ProbeTo) -> None:
        seconds = min(message.seconds, MAX_TRIAL_S)
        token = bytes.fromhex(message.token)
        trials = [asyncio.to_thread(_run_trial, t, token, seconds) for t in message.targets]
        self._send(Probed(message.number, tuple(await asyncio.gather(*trials))))


async def _count_bytes(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """Read the token and all bytes after it. If the token is right, send the number of bytes."""
    if hmac.compare_digest(await reader.readexactly(len(token)), token):
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        writer.write(total.to_bytes(_ANSWER_BYTES, "big"))
        await writer.drain()


def _run_trial(target: ProbeTarget, token: bytes, seconds: float) -> ProbeResult:
    """Connect, and send for a time.

    Args:
        target: node, host and port.
        token: token that the listener expects.
        seconds: time for which to send; 0 to send only the token.
    """
    try:
        with socket.create_connection((target.host, target.port), CONNECT_S) as connection:
            began_at = time.monotonic()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
            connection.sendall(token)
            sent_bytes = _send_for(connection, seconds)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while len(answer) < _ANSWER_BYTES and (data := connection.recv(_ANSWER_BYTES)):
                    answer += data
                total_bytes = int.from_bytes(answer, "big")
            except TimeoutError:  # a slow network: this end knows what has been acknowledged
                total_bytes = sent_bytes - _unacknowledged_bytes(connection)
                if total_bytes <= 0:
                    raise
                answer = total_bytes.to_bytes(_ANSWER_BYTES, "big")
            elapsed_s = time.monotonic() - began_at
    except OSError as error:
        return ProbeResult(target.node, False, trouble=error.strerror or str(error))
    if len(answer) != _ANSWER_BYTES:
        return ProbeResult(target.node, False, trouble="it closed the connection")
    return ProbeResult(target.node, True, total_bytes * 8e-6 / max(elapsed_s, 1e-6))


def _send_for(connection: socket.socket, seconds: float) -> int:
    """Send for ``seconds``. Return the number of bytes that the connection accepted."""
    sent_bytes, until = 0, time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0:
        connection.settimeout(remaining_s)
        try:
            sent_bytes += connection.send(_CHUNK)
        except TimeoutError:
            break
    connection.settimeout(CONNECT_S)
    return sent_bytes


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the peer has not acknowledged."""
    queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(queued, sys.byteorder)
