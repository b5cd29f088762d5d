"""What a worker says to the keeper of another node, and what it is answered. Decides the shape of
messages and how large they are.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import zmq

from malletrain.protocol.job_keys import RoundKeys

PIECE = 1 << 20
"""Bytes of a file that travel at once."""
WINDOW = 8
"""Pieces that are on their way at once."""
MOST_BYTES = PIECE + 4096
"""Of a frame; who announces more is hung up on."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A question to a keeper."""

    number: Number
    """Comes back with the answer."""
    verb: str
    """``read``, ``begin`` (a file is about to arrive), ``write``, ``end``."""
    name: Name
    """Of the file."""
    offset: Bytes = 0
    """Of the piece."""
    length: Bytes = 0
    """Of the piece; of the whole file where it begins."""
    total: Bytes = 0
    """CRC-32 of the whole file where it ends."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a keeper says to it."""

    number: Number
    trouble: str = ""
    """Empty: it is done, and what was asked for follows."""


def keys(secret: bytes, job: str) -> RoundKeys:
    """Those of the keepers of a job."""
    return RoundKeys(secret, f"memory of {job}")


def unlimited(one: zmq.Socket[bytes]) -> None:
    """What is queued is bounded by the window of who asks."""
    one.sndhwm = one.rcvhwm = 0
    one.linger = 0
    one.maxmsgsize = MOST_BYTES
