"""What flows between the rooms: objects as the cache knows them, receipts, errors. Decides
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from infinicache.codec import STRIPE_BYTES, Code, chunk_bytes, stripes

MAX_KEY = 1024


class CacheError(RuntimeError):
    """Something could not be done; the message is a sentence that says what and why."""


class Unavailable(CacheError):
    """No node or proxy of the cache answers."""


class TooLarge(CacheError):
    """The object does not fit into the cache, whatever is evicted."""


class Shape(msgspec.Struct, frozen=True):
    """How an object is cut: its bytes, its code and the bytes of a stripe. ``target_p``: the parity
    that was asked for.
    """

    size: int
    d: int
    p: int
    stripe_bytes: int = STRIPE_BYTES
    target_p: int = 0

    @property
    def code(self) -> Code:
        """Its code."""
        return Code(self.d, self.p)

    @property
    def stripes(self) -> list[int]:
        """Bytes of each stripe."""
        return stripes(self.size, self.stripe_bytes)

    @property
    def share(self) -> int:
        """Bytes a node holds of it: one chunk of each stripe."""
        return sum(chunk_bytes(stripe, self.d) for stripe in self.stripes)


class ObjectPlace(msgspec.Struct, frozen=True):
    """Where an object, or a copy of it, can be read; other fields are passed over."""

    version: int
    shape: Shape
    at: dict[int, str]
    """Chunk → node."""
    name: str
    """What the nodes call it."""
    of: int
    """The version of the object; a copy has one of its own, too."""
    copy: str
    """What a further copy would be called; empty where none is wanted."""


class StoredObject(msgspec.Struct, frozen=True):
    """What a node holds of one object: ``indices`` whose chunks are there for every stripe;
    ``used``: when it was last read.
    """

    key: str
    version: int
    shape: Shape
    indices: list[int]
    used: float


@dataclass(frozen=True)
class Receipt:
    """A put that is done. ``protection``: nodes that may be lost without losing the object; less
    than ``target_protection`` where the pool is too small or nodes failed meanwhile.
    """

    key: str
    version: int
    size: int
    code: Code
    protection: int
    target_protection: int


@dataclass(frozen=True)
class Stat:
    """An object as the cache holds it. ``nodes``: addresses by chunk index, those that are
    there.
    """

    key: str
    version: int
    size: int
    code: Code
    protection: int
    target_protection: int
    nodes: dict[int, str] = field(default_factory=dict)
