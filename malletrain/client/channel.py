"""One socket to the daemon: connects, sends requests and waits for a limited time.

Synchronous. The operations are in :mod:`malletrain.client.operations`.
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
    """The socket of one client, for one thread. Every call raises ClientError if the daemon refuses
    the request, and Unreachable if no daemon answers.

    Args:
        address: the daemon, and this client's keys.
        timeout_s: maximum time for an answer, seconds.
    """

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_up = False

    def call(self, op: str, params: Mapping[str, Any], wait_s: float, changes_state: bool) -> Any:
        """Returns the data of the daemon's answer to one request.

        If the daemon does not know this client and accepts MUNGE, logs in first.

        Args:
            op: the operation.
            params: the parameters of the operation.
            wait_s: time for which ``params`` lets the daemon hold the request before it answers,
                seconds. Added to the timeout.
            changes_state: whether the request changes state at the daemon. If so and the answer is
                lost, the error says that the outcome is unknown.
        """
        try:
            return self._request(op, params, wait_s, changes_state)
        except ClientError as error:
            if error.code != UNAUTHENTICATED:
                raise
            self._log_in(isinstance(error.data, dict) and error.data.get("munge") is True)
        return self._request(op, params, wait_s, changes_state)

    def _log_in(self, munge: bool) -> None:
        """Log in with a MUNGE credential."""
        credential, why = self.address.credential(munge)
        if credential:
            try:
                self._request("login", {"credential": credential}, 0.0, False)
                return
            except ClientError as error:
                why = str(error)
        raise self.address.unknown_key(why)

    def _request(
        self, op: str, params: Mapping[str, Any], wait_s: float, changes_state: bool
    ) -> Any:
        request_id, frames = exchange.request(op, params)
        socket = self._connect()
        socket.send_multipart(frames)
        timeout_s = self.timeout_s + wait_s
        deadline = time.monotonic() + timeout_s
        while True:
            self._wait(socket, deadline, timeout_s, changes_state)
            answer = exchange.reply(socket.recv_multipart(), self.address)
            if answer is not None and answer.id == request_id:
                return exchange.data_of(answer)
            # Otherwise it is the answer to a call that was interrupted, for example by Ctrl-C.

    def close(self) -> None:
        """End the connection."""
        self._disconnect()
        self._context.destroy(linger=0)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None
        self._is_up = False

    def _connect(self) -> zmq.Socket[bytes]:
        """Returns the socket after its handshake. A request sent earlier would wait in a queue for
        a daemon that may not exist.
        """
        if self._socket is not None and self._is_up and not self._is_broken():
            return self._socket
        self._disconnect()
        self._socket = socket = self._context.socket(zmq.DEALER)
        handshake = exchange.Handshake(self.address)
        try:
            self._monitor = exchange.set_up(socket, self.address)
            started = time.monotonic()
            while not handshake.is_hopeless(time.monotonic() - started):
                if self._monitor.poll(100) and handshake.advance(_event(self._monitor)):
                    self._is_up = True
                    return socket
        finally:
            if not self._is_up:
                self._disconnect()
        raise exchange.not_running(self.address)

    def _is_broken(self) -> bool:
        """Returns whether the connection broke since the last call, such as at a restart of the
        daemon.
        """
        while self._monitor is not None and self._monitor.poll(0):
            if _event(self._monitor) in BROKEN:
                return True
        return False

    def _wait(
        self, socket: zmq.Socket[bytes], deadline: float, timeout_s: float, changes_state: bool
    ) -> None:
        """Wait until there is a message to receive. Raises Unreachable if the connection breaks or
        the time is up: ``deadline`` on the monotonic clock, ``timeout_s`` seconds after the
        request.
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
                self._disconnect()
                raise exchange.went_away(self.address, changes_state)
        self._disconnect()
        raise exchange.no_answer(self.address, timeout_s, changes_state)


def _event(monitor: zmq.Socket[bytes]) -> int:
    return zmq.utils.monitor.recv_monitor_message(monitor)["event"]
