"""What the blocking and the asyncio connection to the daemon share: which daemon it is, its address
and keys, the authentication of the client, the socket, the handshake, the frames of a request, and
the decoding of an answer.

Decides which daemon is used: that of a given state directory, else the user's own, else the site's.
Waits for nothing: :mod:`malletrain.client.connection` blocks, :mod:`malletrain.client.aio` does
not.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq

from malletrain.client.errors import UNAUTHENTICATED, ClientError, Unreachable
from malletrain.identity.keys import CLIENT, own_key, read_key, user_name
from malletrain.identity.state_directory import (
    INFO,
    SITE_HINT,
    StateDirError,
    announced,
    default_state_dir,
    read_daemon_info,
    start_hint,
)
from malletrain.identity.users import Munge, UsersError, login_payload
from malletrain.protocol import env, messages, wire


@dataclass(frozen=True)
class Address:
    """One daemon, as this user reaches it."""

    endpoint: str
    """ZeroMQ address, such as ``tcp://127.0.0.1:4711``."""
    server_key: bytes
    """Public CURVE key of the daemon (Z85)."""
    public_key: bytes
    """Public CURVE key of this client (Z85)."""
    secret_key: bytes = field(repr=False)
    """Secret CURVE key of this client (Z85)."""
    hint: str = ""
    """A sentence on how to start the daemon, with a blank before it."""

    def credential(self, munge: bool) -> tuple[str, str]:
        """Return the MUNGE credential for a daemon that does not know this client's key, and the
        reason if there is none.

        Args:
            munge: whether the daemon accepts MUNGE credentials.
        """
        if not (munge and Munge.there()):
            return "", ""
        try:
            payload = login_payload(
                self.server_key.decode("ascii"), self.public_key.decode("ascii")
            )
            return Munge(os.environ.get(env.MUNGE_SOCKET, "")).credential(payload), ""
        except UsersError as error:
            return "", str(error)

    def unknown_key(self, why: str, ignored_line: bool = False) -> ClientError:
        """Return the error for a key that the daemon does not know, with advice on what to do.

        Args:
            why: why MUNGE could not authenticate this client; empty if it was not asked.
            ignored_line: whether the daemon's list of users has the key in an ignored line.
        """
        reason = f" MUNGE could not tell it who you are: {why}" if why else ""
        problem = "'malletrain check' tells its operators what is wrong with it"
        advice = (
            f"Its list of users has your key in a line that it ignores; {problem}. The line should "
            "be"
            if ignored_line
            else f"Give its operators this line for their list of users (if it is there already, "
            f"{problem})"
        )
        return ClientError(
            f"The daemon at {self.endpoint} does not know your key.{reason} {advice}: "
            f"{user_name()} {self.public_key.decode('ascii')}",
            UNAUTHENTICATED,
        )


def find(state_dir: Path | None = None) -> Address:
    """Return the address of the daemon that runs in ``state_dir``; if None, of this user's own
    daemon, else of the site's.

    Raises:
        Unreachable: there is no such daemon.
    """
    try:
        site = None if state_dir else announced()
        if site is not None:
            hint = SITE_HINT
            info, pair = read_daemon_info(site, hint, site=True), own_key()
        else:
            hint, directory = start_hint(), state_dir or default_state_dir()
            info, pair = (
                read_daemon_info(directory / INFO, hint),
                read_key(directory / "keys" / CLIENT),
            )
    except StateDirError as error:
        raise Unreachable(str(error)) from None
    return Address(
        info.endpoint,
        info.server_key.encode("ascii"),
        pair.public.encode("ascii"),
        pair.secret.encode("ascii"),
        f" {hint}" if hint else "",
    )


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
