"""The values that the modules exchange: descriptions of objects, receipts, errors. Decides
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from infinicache.codec import STRIPE_BYTES, Code, chunk_bytes, stripes

MAX_KEY_BYTES = 1024


class CacheError(RuntimeError):
    """An operation failed; the message is a sentence that says which and why."""


class Unavailable(CacheError):
    """No node or proxy of the cache answers."""


class TooLarge(CacheError):
    """The object does not fit into the cache, even if all others are evicted."""


class Shape(msgspec.Struct, frozen=True):
    """How an object is cut.

    ``size``: its bytes; ``d`` and ``p``: its code; ``stripe_bytes``: the maximum size of a stripe;
    ``target_p``: the requested parity.
    """

    size: int
    d: int
    p: int
    stripe_bytes: int = STRIPE_BYTES
    target_p: int = 0

    @property
    def code(self) -> Code:
        """The code of the object."""
        return Code(self.d, self.p)

    @property
    def stripes(self) -> list[int]:
        """Size of each stripe, bytes."""
        return stripes(self.size, self.stripe_bytes)

    @property
    def share(self) -> int:
        """Bytes on each of its nodes: one chunk of each stripe."""
        return sum(chunk_bytes(stripe, self.d) for stripe in self.stripes)


class ObjectPlace(msgspec.Struct, frozen=True):
    """Where an object, or a copy of it, can be read. Unknown fields are ignored."""

    version: int
    shape: Shape
    at: dict[int, str]
    """Index of a chunk → address of its node."""
    name: str
    """Name of the object or copy at the nodes."""
    of: int
    """Version of the object. A copy has another version of its own."""
    copy: str
    """Name of the next copy to make; empty if no copy is needed."""


class StoredObject(msgspec.Struct, frozen=True):
    """The chunks of one object on a node. ``indices``: chunks that are complete, with all stripes;
    ``used``: time of the last read, epoch seconds.
    """

    key: str
    version: int
    shape: Shape
    indices: list[int]
    used: float


@dataclass(frozen=True)
class Receipt:
    """The result of a put. ``protection``: number of nodes whose loss the object survives. It is
    less than ``target_protection`` if the pool is too small or nodes failed during the put.
    """

    key: str
    version: int
    size: int
    code: Code
    protection: int
    target_protection: int


@dataclass(frozen=True)
class Stat:
    """The description of an object. ``nodes``: index of each available chunk → address of its
    node.
    """

    key: str
    version: int
    size: int
    code: Code
    protection: int
    target_protection: int
    nodes: dict[int, str] = field(default_factory=dict)
