"""Tests the network between this node and others at the daemon's request: whether a connection is
possible, and its throughput.

The listener accepts only a token, and then bytes that it counts. It closes after OPEN_S. The daemon
decides which nodes connect and what follows.
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
                await asyncio.wait_for(_count_bytes(reader, writer, token), OPEN_S)
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
    """Send for ``seconds``. Returns the number of bytes that the connection accepted."""
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
    """Returns the number of bytes that the peer has not acknowledged."""
    queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(queued, sys.byteorder)
