"""The launcher's end of the socket to the processes that it started: JSON objects, one per line.

Never blocks, and accepts any input: an invalid line is reported and dropped, and a process that
sends an endless line or reads nothing is disconnected. The launcher decides what a line means.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from malletrain.protocol.bounds import MAX_WORTH_SIZES, Amount, Count, Duration

MAX_BUFFERED_BYTES = 1 << 20
"""Maximum size of an incomplete line, and of the output that a process has not read yet, bytes."""
MAX_CONNECTIONS = 256
_READ_BYTES = 65536
_READS_PER_TURN = 16


class ProcessLine(msgspec.Struct, frozen=True):
    """One line from a process. Other fields are ignored."""

    say: str
    """Kind of line: ``hello``, ``ready``, ``running``, ``lost``, ``heard``, ``restart`` (live
    mode); ``join``, ``ready``, ``drained``, ``worth`` (a service).
    """
    local_rank: int = -1
    """With ``hello``: local rank of the worker."""
    generation: int = 0
    """Number of the round that the line is about."""
    address: str = ""
    """With ``join``: address at which the process can be reached."""
    nodes: Annotated[dict[Count, Amount], msgspec.Meta(max_length=MAX_WORTH_SIZES)] = {}
    """With ``worth``: value of each number of nodes, samples/s."""
    expires_s: Duration | None = None
    """With ``worth``: time after which the values lapse, seconds; None: they do not."""
    loading: bool = False
    """With ``join``: whether ``ready`` follows later."""


class LineConnection:
    """The connection of one process."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._socket.setblocking(False)
        self._unread = b""
        self._unsent = b""
        self.open = True
        """Whether neither end has closed the connection."""

    def fileno(self) -> int:
        """Return the file descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue ``message``. The end of a process is noticed elsewhere."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as possible without blocking."""
        try:
            while self._unsent and self.open:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > MAX_BUFFERED_BYTES:
                _tell("closed the connection of a process that does not read its messages")
                self.open = False
        except OSError:
            self.open = False

    def receive(self) -> list[ProcessLine]:
        """Return the lines received since the last call, up to a maximum per turn."""
        received: list[ProcessLine] = []
        for _ in range(_READS_PER_TURN):
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
            received += [message for line in lines if (message := _parse(line)) is not None]
            if len(self._unread) > MAX_BUFFERED_BYTES:
                _tell(
                    "closed the connection of a process that sent an endless line: "
                    f"{self._unread[:80]!r}"
                )
                self.open = False
                break
        return received

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        self._socket.close()


class LineEndpoint:
    """A socket to which the processes of a job connect."""

    def __init__(self, path: str, watch: Callable[[int, bool], None]) -> None:
        """Listen.

        Args:
            path: path of the Unix socket, in a directory that no other user can enter.
            watch: called with each file descriptor and True to wake on it, and with False to stop.

        Raises:
            OSError: the socket cannot be created.
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
        """Return the lines of all processes since the last call. Removes the connections that are
        closed.
        """
        self._accept()
        received = []
        for connection in self._connections:
            received += [(connection, message) for message in connection.receive()]
            connection.flush()
        for closed in [c for c in self._connections if not c.open]:
            self.hang_up(closed)
        return received

    def hang_up(self, connection: LineConnection) -> None:
        """Close ``connection``. A second call does nothing."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._watch(connection.fileno(), False)
            connection.close()

    def close(self) -> None:
        """Close all connections and remove the socket."""
        for connection in list(self._connections):
            self.hang_up(connection)
        self._watch(self._listener.fileno(), False)
        self._listener.close()
        os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                own, _ = self._listener.accept()
            except OSError:  # no connection, or too many open files; the next call tries again
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                own.close()
                continue
            connection = LineConnection(own)
            self._connections.append(connection)
            self._watch(connection.fileno(), True)


def _parse(line: bytes) -> ProcessLine | None:
    try:
        return msgspec.json.decode(line, type=ProcessLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        _tell(f"a process sent an invalid line: {line[:80]!r}")
        return None


def _tell(sentence: str) -> None:
    print(f"malletrain launcher: {sentence}", flush=True)
