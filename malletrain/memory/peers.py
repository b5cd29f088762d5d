"""Client of the keepers of other nodes, for workers.

Decides how many requests are in flight, and when another node counts as lost: its launcher has
closed the connection, or has sent nothing for some time.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from malletrain.memory.keeper_messages import (
    PIECE,
    WINDOW,
    Answer,
    KeeperRequest,
    keys,
    remove_queue_limits,
)
from malletrain.protocol.open_sockets import OpenSockets

SILENCE_S = 20.0
"""Time without a message, seconds, after which a node counts as lost."""
_RETRY_MS = 50


class PeerError(OSError):
    """Another node did not send or accept a file; the message is for the user."""


class RemoteKeeper:
    """Connection to the keeper of another node of the job. A context manager that closes the
    connection.

    Args:
        address: address of the keeper.
        secret: secret of the job.
        job: id of the job.
        silence_s: maximum time without a message from it, seconds.

    Raises:
        PeerError: ``address`` is invalid.
    """

    def __init__(self, address: str, secret: bytes, job: str, silence_s: float = SILENCE_S) -> None:
        self.address = address
        self._silence_s = silence_s
        context: zmq.Context[Any] = zmq.Context()
        self._open = OpenSockets(self, context)
        dealer = self._dealer = context.socket(zmq.DEALER)
        self._open.add(dealer)
        keys(secret, job).call(dealer)
        remove_queue_limits(dealer)
        dealer.ipv6 = address.startswith("[")
        dealer.reconnect_ivl = _RETRY_MS
        self._monitor: Any = dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._open.add(self._monitor)
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._open.close()
            raise PeerError(f"{address} is no address of a node: {error.strerror}.") from error

    def __enter__(self) -> RemoteKeeper:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def fetch(self, name: str, pieces: Iterable[tuple[int, int]], put: Put) -> int:
        """Fetch parts of a file.

        Args:
            name: name of the file on the other node.
            pieces: (offset, length) of each part, bytes.
            put: called with (offset, data), in the order of ``pieces``.

        Returns:
            The number of bytes received.

        Raises:
            PeerError: the node has no such file, or is lost.
        """
        received = 0

        def requests() -> Iterator[tuple[KeeperRequest, bytes]]:
            for offset, length in pieces:
                for at in range(offset, offset + length, PIECE):
                    yield KeeperRequest(0, "read", name, at, min(PIECE, offset + length - at)), b""

        for ask, data in self._exchange(requests()):
            if len(data) != ask.length:
                raise PeerError(f"{name} is shorter at {self.address} than it should be.")
            put(ask.offset, data)
            received += len(data)
        return received

    def push(self, source: Path, name: str) -> int:
        """Send a file. Afterwards the other node has all of it.

        Args:
            source: path of the file here.
            name: name of the file on the other node.

        Returns:
            The number of bytes sent.

        Raises:
            PeerError: the node does not accept the file, or is lost.
            OSError: the file cannot be read.
        """
        with open(source, "rb") as file:
            size = os.fstat(file.fileno()).st_size

            def requests() -> Iterator[tuple[KeeperRequest, bytes]]:
                yield KeeperRequest(0, "begin", name, 0, size), b""
                at = total = 0
                while at < size and (data := file.read(PIECE)):
                    total = zlib.crc32(data, total)
                    yield KeeperRequest(0, "write", name, at), data
                    at += len(data)
                yield KeeperRequest(0, "end", name, 0, size, total), b""

            for _ in self._exchange(requests()):
                pass
        return size

    def _exchange(
        self, requests: Iterator[tuple[KeeperRequest, bytes]]
    ) -> Iterator[tuple[KeeperRequest, bytes]]:
        """Send requests, several at a time, and yield each with the data of its answer, in
        order.
        """
        waiting: dict[int, KeeperRequest] = {}
        number, more = 0, True
        while more or waiting:
            while more and len(waiting) < WINDOW:
                next_request = next(requests, None)
                if next_request is None:
                    more = False
                    break
                ask, data = next_request
                ask = msgspec.structs.replace(ask, number=number)
                self._dealer.send_multipart([msgspec.msgpack.encode(ask), data], copy=False)
                waiting[number], number = ask, number + 1
            if waiting:
                answer, data = self._receive()
                request = waiting.pop(answer.number, None)
                if answer.trouble:
                    raise PeerError(answer.trouble)
                if request is not None:
                    yield request, data

    def _receive(self) -> tuple[Answer, bytes]:
        deadline = time.monotonic() + self._silence_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(remaining_s * 1000) + 1))
            if self._dealer in ready:
                header, data = self._dealer.recv_multipart()
                return msgspec.msgpack.decode(header, type=Answer), data
            if self._monitor in ready:
                event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise PeerError(f"The node at {self.address} does not take this job's key.")
                raise PeerError(f"The node at {self.address} is gone.")
        raise PeerError(
            f"The node at {self.address} does not respond ({self._silence_s:g} s waited)."
        )


Put = Callable[[int, bytes], object]
"""Function of (offset, data) that receives a part of a file."""
