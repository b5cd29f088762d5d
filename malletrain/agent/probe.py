"""Tests the network between this node and others at the daemon's request: whether a connection is
possible, and its throughput.

The listener accepts only a token and bytes that it counts, and closes after some seconds. The
daemon decides which nodes connect and what follows.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import logging
import socket
import sys
import termios
import time
from collections.abc import Callable

from malletrain.protocol.messages import (
    Message,
    Probed,
    ProbeOpen,
    ProbeTo,
    ProbeUp,
)
from malletrain.protocol.payloads import ProbeResult, ProbeTarget

CONNECT_S = 3.0
OPEN_S = 20.0
MOST_S = 2.0
"""No trial takes longer, whoever asks for it."""
_CHUNK = bytes(1 << 20)
_WAITING_BYTES = 1 << 20
"""Bytes that wait here for a slow way at most, that it is not kept busy for long."""
_ANSWER_BYTES = 8

log = logging.getLogger("malletrain.agent")


class Prober:
    """The trials of one agent. ``send`` reaches the daemon."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, message: ProbeOpen | ProbeTo) -> None:
        """Begin what the daemon asks for."""
        work = self._open(message) if isinstance(message, ProbeOpen) else self._try(message)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    async def _open(self, message: ProbeOpen) -> None:
        token = bytes.fromhex(message.token)

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await asyncio.wait_for(_counted(reader, writer, token), OPEN_S)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                pass  # who does not know the token, or went, or says no more
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
        seconds = min(message.seconds, MOST_S)
        token = bytes.fromhex(message.token)
        trials = [asyncio.to_thread(_tried, t, token, seconds) for t in message.targets]
        self._send(Probed(message.number, tuple(await asyncio.gather(*trials))))


async def _counted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """Tell who knows the token how many bytes came after it."""
    if hmac.compare_digest(await reader.readexactly(len(token)), token):
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        writer.write(total.to_bytes(_ANSWER_BYTES, "big"))
        await writer.drain()


def _tried(target: ProbeTarget, token: bytes, seconds: float) -> ProbeResult:
    """Connect, and send for so many seconds (0: nothing but the token)."""
    try:
        with socket.create_connection((target.host, target.port), CONNECT_S) as way:
            began = time.monotonic()
            way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _WAITING_BYTES)
            way.sendall(token)
            sent = _sent(way, seconds)
            way.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while len(answer) < _ANSWER_BYTES and (data := way.recv(_ANSWER_BYTES)):
                    answer += data
                total = int.from_bytes(answer, "big")
            except TimeoutError:  # a slow way: what it has carried is known here, too
                total = sent - _waiting(way)
                if total <= 0:
                    raise
                answer = total.to_bytes(_ANSWER_BYTES, "big")
            took = time.monotonic() - began
    except OSError as error:
        return ProbeResult(target.node, False, trouble=error.strerror or str(error))
    if len(answer) != _ANSWER_BYTES:
        return ProbeResult(target.node, False, trouble="it hung up")
    return ProbeResult(target.node, True, total * 8e-6 / max(took, 1e-6))


def _sent(way: socket.socket, seconds: float) -> int:
    """Send for so many seconds, however little the way takes; how many bytes it took."""
    sent, until = 0, time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0:
        way.settimeout(remaining_s)
        try:
            sent += way.send(_CHUNK)
        except TimeoutError:
            break
    way.settimeout(CONNECT_S)
    return sent


def _waiting(way: socket.socket) -> int:
    """Bytes that the other end has not acknowledged."""
    queued = fcntl.ioctl(way.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(queued, sys.byteorder)
