"""One socket to the daemon: connect, ask, wait a bounded time, and say in a sentence what went
wrong.

Synchronous. What is asked: :mod:`malletrain.client.operations`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.utils.monitor

from malletrain.client.address import Address
from malletrain.client.errors import STRANGER, ClientError, Unreachable
from malletrain.protocol import messages, wire

TIMEOUT_S = 10.0
"""How long an answer may take beyond the time the daemon was asked to wait."""
CONNECT_S = 5.0
"""How long the encrypted connection may take to come up."""
ABSENT_S = 1.0
"""How long the address may refuse the connection before the daemon counts as not running."""

BROKEN = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)


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
        self.endpoint = address.endpoint
        self._hint = address.hint
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
            if error.code != STRANGER:
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
        raise self.address.stranger(why)

    def _ask(self, op: str, params: Mapping[str, Any], wait_s: float, changes: bool) -> Any:
        request = messages.Request(id=uuid.uuid4().hex, op=op, params=dict(params))
        try:
            frames = wire.encode(request)
        except wire.WireError as error:
            raise ClientError(str(error), "usage") from None
        socket = self._connected()
        socket.send_multipart(frames)
        deadline = time.monotonic() + self.timeout_s + wait_s
        while True:
            self._wait(socket, deadline, changes)
            try:
                answer = wire.decode(socket.recv_multipart())
            except wire.WireError as error:
                sentence = (
                    f"The daemon at {self.endpoint} answered in a form this version does "
                    f"not know: {error}"
                )
                raise ClientError(sentence, "internal") from None
            if isinstance(answer, messages.Error):
                raise ClientError(answer.sentence)
            if isinstance(answer, messages.Reply) and answer.id == request.id:
                if answer.ok:
                    return answer.data
                raise ClientError(
                    answer.error or "The daemon refused and did not say why.",
                    answer.code or "refused",
                    answer.data,
                )
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
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.ipv6 = "[" in self.endpoint
            at = self.address
            socket.curve_serverkey = at.server_key
            socket.curve_publickey, socket.curve_secretkey = at.public_key, at.secret_key
            self._monitor = socket.get_monitor_socket()
            socket.connect(self.endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            self._drop()
            why = error.strerror if isinstance(error, zmq.ZMQError) else str(error)
            raise Unreachable(
                f"The daemon's address {self.endpoint} or its key cannot be used "
                f"({why}).{self._hint}"
            ) from None
        began = time.monotonic()
        refused = False
        while (now := time.monotonic()) - began < CONNECT_S:
            if self._monitor.poll(100):
                event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._up = True
                    return socket
                if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    self._drop()
                    raise Unreachable(
                        f"The daemon at {self.endpoint} does not accept this client's key; "
                        "use the state directory that the daemon runs with."
                    )
                refused = refused or event == zmq.EVENT_CONNECT_RETRIED
                if event == zmq.EVENT_CONNECTED:
                    refused = False
            if refused and now - began > ABSENT_S:
                break
        self._drop()
        raise Unreachable(f"No daemon answers at {self.endpoint}: it is not running.{self._hint}")

    def _broke(self) -> bool:
        """Whether the connection broke since the last call, as it does when the daemon is
        restarted.
        """
        while self._monitor is not None and self._monitor.poll(0):
            if zmq.utils.monitor.recv_monitor_message(self._monitor)["event"] in BROKEN:
                return True
        return False

    def _wait(self, socket: zmq.Socket[bytes], deadline: float, changes: bool) -> None:
        """Until there is something to receive. Raises Unreachable when the connection breaks or the
        time is up.
        """
        assert self._monitor is not None
        unknown = (
            " Whether it carried the request out is not known; look with 'malletrain status'."
            if changes
            else ""
        )
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(left * 1000))))
            if socket in ready:
                return
            if self._monitor in ready:
                event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
                if event in BROKEN:
                    self._drop()
                    raise Unreachable(
                        f"The daemon at {self.endpoint} went away before it "
                        f"answered.{unknown}{self._hint}"
                    )
        self._drop()
        raise Unreachable(
            f"The daemon at {self.endpoint} did not answer within {self.timeout_s:g} s.{unknown}"
        )
