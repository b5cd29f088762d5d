"""The launcher's end of the socket to the processes that it started: JSON objects, one a line.

Never blocks and accepts any input: an invalid line is reported and dropped, and a process that
sends a line without end or reads nothing is disconnected. The launcher decides what a line means.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from malletrain.protocol.bounds import MAX_WORTH_SIZES, Amount, Count

MOST_BYTES = 1 << 20
"""Bytes of one line that is not finished, and of what a process has not taken yet."""
MOST_CONNECTIONS = 256
_READ_BYTES = 65536
_READS_A_TURN = 16


class ProcessLine(msgspec.Struct, frozen=True):
    """One line from a process; other fields than these are passed over."""

    say: str
    """``hello``, ``ready``, ``running``, ``lost``, ``heard`` (live mode); ``join``, ``drained``,
    ``worth`` (a service).
    """
    local_rank: int = -1
    """With ``hello``: which of the node's workers this is."""
    generation: int = 0
    """The round that it speaks of."""
    address: str = ""
    """With ``join``: where the process can be reached."""
    nodes: Annotated[dict[Count, Amount], msgspec.Meta(max_length=MAX_WORTH_SIZES)] = {}
    """With ``worth``: what so many nodes are worth, samples/s."""


class LineConnection:
    """One process that has called."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._socket.setblocking(False)
        self._unread = b""
        self._unsent = b""
        self.open = True
        """False once either end has hung up."""

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue ``message``; a process that is gone is noticed elsewhere."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the process takes now."""
        try:
            while self._unsent and self.open:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > MOST_BYTES:
                _tell("hung up on a process that does not take the news")
                self.open = False
        except OSError:
            self.open = False

    def receive(self) -> list[ProcessLine]:
        """What was said since the last time, as much of it as one turn allows."""
        heard: list[ProcessLine] = []
        for _ in range(_READS_A_TURN):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.open = False
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            heard += [message for line in lines if (message := _understood(line)) is not None]
            if len(self._unread) > MOST_BYTES:
                _tell(f"hung up on a process whose line has no end: {self._unread[:80]!r}")
                self.open = False
                break
        return heard

    def close(self) -> None:
        """Hang up."""
        self.open = False
        self._socket.close()


class LineEndpoint:
    """A socket that the processes of a job call."""

    def __init__(self, path: str, watch: Callable[[int, bool], None]) -> None:
        """Listen.

        Args:
            path: Of the Unix socket, in a directory that nobody else may enter.
            watch: Is told of each descriptor to wake on, and (False) not to any more.

        Raises:
            OSError: The socket cannot be made.
        """
        self.path = path
        self._watch = watch
        self._connections: list[LineConnection] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        watch(self._listener.fileno(), True)

    def receive(self) -> list[tuple[LineConnection, ProcessLine]]:
        """What all processes said since the last time. Those that hung up are gone afterwards."""
        self._accept()
        heard = []
        for connection in self._connections:
            heard += [(connection, message) for message in connection.receive()]
            connection.flush()
        for gone in [c for c in self._connections if not c.open]:
            self.hang_up(gone)
        return heard

    def hang_up(self, connection: LineConnection) -> None:
        """Close ``connection``; a second time does nothing."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._watch(connection.fileno(), False)
            connection.close()

    def close(self) -> None:
        """Close everything and take the socket away."""
        for connection in list(self._connections):
            self.hang_up(connection)
        self._watch(self._listener.fileno(), False)
        self._listener.close()
        os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                own, _ = self._listener.accept()
            except OSError:  # nobody there, or too many files open: it will be tried again
                return
            if len(self._connections) >= MOST_CONNECTIONS:
                own.close()
                continue
            connection = LineConnection(own)
            self._connections.append(connection)
            self._watch(connection.fileno(), True)


def _understood(line: bytes) -> ProcessLine | None:
    try:
        return msgspec.json.decode(line, type=ProcessLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        _tell(f"a process said something that is not understood: {line[:80]!r}")
        return None


def _tell(sentence: str) -> None:
    print(f"malletrain launcher: {sentence}", flush=True)
