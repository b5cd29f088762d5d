"""The chunks in one node's memory. Pure: bytes in, bytes out; it decides what a node accepts, not
what is evicted.

A node never holds two versions of one key: the newer drives the older out. What was dropped stays
dropped: a chunk of a version at or below the last one dropped is refused, however late it comes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from infinicache import isal
from infinicache.codec import chunk_bytes
from infinicache.isal import Buffer
from infinicache.objects import HeldObject, Shape

REMEMBERED_DROPS = 100_000


class Refusal(Exception):
    """The chunk is not taken, or not there; ``code`` says why: stale, corrupt, full, absent."""

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass
class _Object:
    version: int
    shape: Shape
    chunks: dict[tuple[int, int], tuple[Buffer, int]] = field(default_factory=dict)
    used: float = field(default_factory=time.time)


class ChunkStore:
    """At most ``capacity`` bytes of chunks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._objects: dict[str, _Object] = {}
        self._dropped: OrderedDict[str, int] = OrderedDict()

    def put(
        self, key: str, version: int, shape: Shape, stripe: int, index: int, crc: int, data: Buffer
    ) -> None:
        """Take a chunk. Raises Refusal when it is damaged, of an old version, of a wrong length, or
        too much.
        """
        known = self._objects.get(key)
        newest = max(self._dropped.get(key, 0), known.version - 1 if known else 0)
        if version <= newest:
            raise Refusal(f"Version {version} of {key!r} is overtaken.", "stale")
        sizes = shape.stripes
        if not (0 <= stripe < len(sizes) and 0 <= index < shape.code.n) or len(data) != chunk_bytes(
            sizes[stripe], shape.d
        ):
            raise Refusal(
                f"The chunk ({stripe}, {index}) of {len(data)} bytes does not fit an object of "
                f"{shape.size} bytes.",
                "corrupt",
            )
        if isal.crc64(data) != crc:
            raise Refusal(
                f"The chunk ({stripe}, {index}) of {key!r} was damaged on its way.", "corrupt"
            )
        if known is not None and known.version < version:
            self.drop(key, known.version)
            known = None
        before = (
            len(known.chunks[stripe, index][0])
            if known is not None and (stripe, index) in known.chunks
            else 0
        )
        if self.used - before + len(data) > self.capacity:
            raise Refusal(
                f"The node is full: {self.used} of {self.capacity} bytes are in use.", "full"
            )
        if known is None:
            known = self._objects[key] = _Object(version, shape)
        known.chunks[stripe, index] = (data, crc)
        self.used += len(data) - before

    def get(
        self, key: str, version: int, stripe: int, index: int, touch: bool = True
    ) -> tuple[Buffer, int]:
        """A chunk and its checksum; ``touch``: this is a read of the object. Raises Refusal when it
        is not here.
        """
        known = self._objects.get(key)
        if known is None or known.version != version or (stripe, index) not in known.chunks:
            raise Refusal(
                f"The chunk ({stripe}, {index}) of version {version} of {key!r} is not here.",
                "absent",
            )
        if touch:
            known.used = time.time()
        return known.chunks[stripe, index]

    def chunks(self) -> dict[tuple[str, int, int, int], Shape]:
        """(key, version, stripe, index) of everything here."""
        return {
            (key, o.version, stripe, index): o.shape
            for key, o in self._objects.items()
            for stripe, index in o.chunks
        }

    def drop(self, key: str, version: int) -> None:
        """Forget ``version`` and all older ones of ``key``, and take them no more."""
        if version > self._dropped.get(key, 0):
            self._dropped[key] = version
            self._dropped.move_to_end(key)
            while len(self._dropped) > REMEMBERED_DROPS:
                self._dropped.popitem(last=False)
        known = self._objects.get(key)
        if known is not None and known.version <= version:
            self.used -= sum(len(data) for data, _ in known.chunks.values())
            del self._objects[key]

    def forget(self, key: str, version: int, index: int) -> None:
        """Let go of one index of an object, which is elsewhere now."""
        known = self._objects.get(key)
        if known is None or known.version != version:
            return
        for chunk in [c for c in known.chunks if c[1] == index]:
            self.used -= len(known.chunks.pop(chunk)[0])
        if not known.chunks:
            del self._objects[key]

    def inventory(self) -> list[HeldObject]:
        """Everything that is held whole."""
        found = []
        for key, known in self._objects.items():
            count = len(known.shape.stripes)
            whole = [
                i
                for i in range(known.shape.code.n)
                if all((s, i) in known.chunks for s in range(count))
            ]
            found.append(HeldObject(key, known.version, known.shape, whole, known.used))
        return found
