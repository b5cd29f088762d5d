"""What the blocking and the asyncio connection to the daemon share: socket, handshake, the frames
of a request, and the decoding of an answer.

Waits for nothing: :mod:`malletrain.client.connection` blocks, :mod:`malletrain.client.aio` does
not.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import zmq

from malletrain.client.address import Address
from malletrain.client.errors import ClientError, Unreachable
from malletrain.protocol import env, messages, wire


def timeout_of(text: str) -> float:
    """Return the timeout for an answer, seconds, from the user's setting, limited to 1 second to 1
    day. Text that is not a number counts as not set.
    """
    try:
        return min(max(1.0, float(text)), 86400.0)
    except ValueError:
        return 10.0


TIMEOUT_S = timeout_of(os.environ.get(env.TIMEOUT, ""))
"""Maximum time for an answer beyond the time the daemon was asked to wait, seconds."""
CONNECT_S = max(5.0, TIMEOUT_S / 2)
"""Maximum time for the handshake of the encrypted connection, seconds."""
ABSENT_S = 1.0
"""Time of refused connections after which the daemon counts as not running, seconds."""
BROKEN = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)

S = TypeVar("S", bound="zmq.Socket[Any]")


def set_up(socket: S, at: Address) -> S:
    """Connect ``socket`` to the daemon; return the monitor of its connection.

    Raises:
        Unreachable: its address or its key is invalid.
    """
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.ipv6 = "[" in at.endpoint
        socket.curve_serverkey = at.server_key
        socket.curve_publickey, socket.curve_secretkey = at.public_key, at.secret_key
        monitor: S = socket.get_monitor_socket()
        socket.connect(at.endpoint)
    except (zmq.ZMQError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, zmq.ZMQError) else str(error)
        raise Unreachable(
            f"The daemon's address {at.endpoint} or its key cannot be used ({why}).{at.hint}"
        ) from None
    return monitor


class Handshake:
    """State of the handshake of the encrypted connection, from the events of the socket's
    monitor."""

    def __init__(self, at: Address) -> None:
        self._at = at
        self._refused = False

    def advance(self, event: int) -> bool:
        """Handle one event. Return whether it completes the connection. Raises Unreachable if the
        key is not accepted.
        """
        if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            raise Unreachable(
                f"The daemon at {self._at.endpoint} does not accept this client's key; "
                "use the state directory that the daemon runs with."
            )
        if event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CONNECTED):
            self._refused = event == zmq.EVENT_CONNECT_RETRIED
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def is_hopeless(self, waited_s: float) -> bool:
        """Return whether to give up after ``waited_s`` seconds."""
        return waited_s >= CONNECT_S or (self._refused and waited_s > ABSENT_S)


def request(op: str, params: Mapping[str, Any]) -> tuple[str, list[bytes]]:
    """Return the id and the frames of a request. Raises ClientError if it cannot be encoded or is
    too large."""
    request_id = uuid.uuid4().hex
    try:
        message = wire.request(request_id, op, params)
        return request_id, wire.encode(message, wire.MAX_REQUEST_BYTES)
    except wire.WireError as error:
        raise ClientError(str(error), "usage") from None


def reply(frames: Sequence[bytes], at: Address) -> messages.Reply | None:
    """Return the answer in these frames; None if they are another message. Raises ClientError if
    they are invalid.
    """
    try:
        answer = wire.decode(frames)
    except wire.WireError as error:
        raise ClientError(
            f"The daemon at {at.endpoint} answered in a form this version does not know: {error}",
            "internal",
        ) from None
    if isinstance(answer, messages.Error):
        raise ClientError(answer.sentence)
    return answer if isinstance(answer, messages.Reply) else None


def data_of(answer: messages.Reply) -> Any:
    """Return the data of an answer. Raises ClientError if the daemon refused."""
    if answer.ok:
        return answer.data
    raise ClientError(
        answer.error or "The daemon refused and did not say why.",
        answer.code or "refused",
        answer.data,
    )


def not_running(at: Address) -> Unreachable:
    """Return the error: no daemon answers at the address."""
    return Unreachable(f"No daemon answers at {at.endpoint}: it is not running.{at.hint}")


def went_away(at: Address, changes_state: bool) -> Unreachable:
    """Return the error: the connection broke before the answer. ``changes_state``: whether the
    request changes state at the daemon."""
    return Unreachable(
        f"The daemon at {at.endpoint} went away before it "
        f"answered.{_outcome_unknown(changes_state)}{at.hint}"
    )


def no_answer(at: Address, timeout_s: float, changes_state: bool) -> Unreachable:
    """Return the error: no answer within the timeout."""
    return Unreachable(
        f"The daemon at {at.endpoint} did not answer within {timeout_s:g} "
        f"s.{_outcome_unknown(changes_state)}"
    )


def _outcome_unknown(changes_state: bool) -> str:
    if not changes_state:
        return ""
    return " Whether it carried the request out is not known; look with 'malletrain status'."
