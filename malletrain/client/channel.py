"""One socket to the daemon: connect, ask and wait a bounded time.

Synchronous. What is asked: :mod:`malletrain.client.operations`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.utils.monitor

from malletrain.client import exchange
from malletrain.client.address import Address
from malletrain.client.errors import UNAUTHENTICATED, ClientError
from malletrain.client.exchange import BROKEN, TIMEOUT_S


class Channel:
    """The socket of one client, for one thread. Every call raises ClientError when the daemon
    refuses and Unreachable when there is none.

    Args:
        address: the daemon, and who asks.
        timeout_s: how long an answer may take, seconds.
    """

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._up = False

    def call(self, op: str, params: Mapping[str, Any], wait_s: float, changes: bool) -> Any:
        """The data of the daemon's answer to one request.

        A daemon that does not know this client is told who it is, where it believes MUNGE.

        Args:
            op: the operation.
            params: what it is asked with.
            wait_s: time the daemon was asked to wait, seconds.
            changes: the request changes something, so that a lost answer leaves open whether it
                was carried out, and the error says so.
        """
        try:
            return self._ask(op, params, wait_s, changes)
        except ClientError as error:
            if error.code != UNAUTHENTICATED:
                raise
            self._introduce(isinstance(error.data, dict) and error.data.get("munge") is True)
        return self._ask(op, params, wait_s, changes)

    def _introduce(self, munge: bool) -> None:
        """Let MUNGE tell the daemon who this is."""
        credential, why = self.address.credential(munge)
        if credential:
            try:
                self._ask("login", {"credential": credential}, 0.0, False)
                return
            except ClientError as error:
                why = str(error)
        raise self.address.unknown_key(why)

    def _ask(self, op: str, params: Mapping[str, Any], wait_s: float, changes: bool) -> Any:
        name, frames = exchange.request(op, params)
        socket = self._connected()
        socket.send_multipart(frames)
        deadline = time.monotonic() + self.timeout_s + wait_s
        while True:
            self._wait(socket, deadline, changes)
            answer = exchange.reply(socket.recv_multipart(), self.address)
            if answer is not None and answer.id == name:
                return exchange.data_of(answer)
            # Else: the late answer to a call given up before.

    def close(self) -> None:
        """End the connection."""
        self._drop()
        self._context.destroy(linger=0)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None
        self._up = False

    def _connected(self) -> zmq.Socket[bytes]:
        """The socket after its handshake. Sending before that would leave a call in a queue of a
        daemon that never comes.
        """
        if self._socket is not None and self._up and not self._broke():
            return self._socket
        self._drop()
        self._socket = socket = self._context.socket(zmq.DEALER)
        handshake = exchange.Handshake(self.address)
        try:
            self._monitor = exchange.set_up(socket, self.address)
            began = time.monotonic()
            while not handshake.hopeless(time.monotonic() - began):
                if self._monitor.poll(100) and handshake.advance(_event(self._monitor)):
                    self._up = True
                    return socket
        finally:
            if not self._up:
                self._drop()
        raise exchange.not_running(self.address)

    def _broke(self) -> bool:
        """Whether the connection broke since the last call, as it does when the daemon is
        restarted.
        """
        while self._monitor is not None and self._monitor.poll(0):
            if _event(self._monitor) in BROKEN:
                return True
        return False

    def _wait(self, socket: zmq.Socket[bytes], deadline: float, changes: bool) -> None:
        """Until there is something to receive. Raises Unreachable when the connection breaks or the
        time is up.
        """
        assert self._monitor is not None
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(remaining_s * 1000))))
            if socket in ready:
                return
            if self._monitor in ready and _event(self._monitor) in BROKEN:
                self._drop()
                raise exchange.went_away(self.address, changes)
        self._drop()
        raise exchange.no_answer(self.address, self.timeout_s, changes)


def _event(monitor: zmq.Socket[bytes]) -> int:
    return zmq.utils.monitor.recv_monitor_message(monitor)["event"]
