"""Messages between a worker and the keeper of another node. Decides their format and their maximum
size.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import zmq

from malletrain.protocol.job_keys import RoundKeys

PIECE = 1 << 20
"""Maximum number of bytes of a file per message."""
WINDOW = 8
"""Maximum number of requests in flight."""
MAX_FRAME_BYTES = PIECE + 4096
"""Maximum size of a frame, bytes. A connection that announces a larger one is closed."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class KeeperRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A request to a keeper."""

    number: Number
    """Number of the request, repeated in the answer."""
    verb: str
    """``read``; or, to send a file, ``begin``, ``write`` and ``end``."""
    name: Name
    """Name of the file."""
    offset: Bytes = 0
    """Offset of the piece in the file, bytes."""
    length: Bytes = 0
    """Length of the piece, bytes; with ``begin`` that of the whole file."""
    total: Bytes = 0
    """With ``end``: CRC-32 of the whole file."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A keeper's answer to a request."""

    number: Number
    trouble: str = ""
    """Error message; empty on success, when the requested data follows in the next frame."""


def keys(secret: bytes, job: str) -> RoundKeys:
    """Return the keys of the keepers of a job."""
    return RoundKeys(secret, f"memory of {job}")


def remove_queue_limits(socket: zmq.Socket[bytes]) -> None:
    """Remove the limits of the socket's queues, because :data:`WINDOW` limits the requests in
    flight.
    """
    socket.sndhwm = socket.rcvhwm = 0
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
