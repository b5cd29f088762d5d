"""The chunks in the memory of one node. Pure: bytes in, bytes out. Decides which chunks a node
accepts, not which objects are evicted.

A node has at most one version of a key: a newer one replaces an older one. A dropped version never
returns: a chunk of the last dropped version or of an older one is refused, however late it arrives.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from infinicache import isal
from infinicache.codec import chunk_bytes
from infinicache.isal import Buffer
from infinicache.objects import Shape, StoredObject

REMEMBERED_DROPS = 100_000


class Refusal(Exception):
    """A chunk is not accepted or not available. ``code`` is the reason: stale, corrupt, full,
    absent.
    """

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
    """The chunks of a node, at most ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._objects: dict[str, _Object] = {}
        self._dropped: OrderedDict[str, int] = OrderedDict()

    def put(
        self, key: str, version: int, shape: Shape, stripe: int, index: int, crc: int, data: Buffer
    ) -> None:
        """Store a chunk.

        Args:
            key, version, shape: the object.
            stripe, index: the chunk.
            crc: its checksum (CRC-64/XZ).
            data: its content.

        Raises:
            Refusal: the chunk is damaged, of an old version or of a wrong length, or the node is
                full.
        """
        entry = self._objects.get(key)
        newest = max(self._dropped.get(key, 0), entry.version - 1 if entry else 0)
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
        if entry is not None and entry.version < version:
            self.drop(key, entry.version)
            entry = None
        before = (
            len(entry.chunks[stripe, index][0])
            if entry is not None and (stripe, index) in entry.chunks
            else 0
        )
        if self.used - before + len(data) > self.capacity:
            raise Refusal(
                f"The node is full: {self.used} of {self.capacity} bytes are in use.", "full"
            )
        if entry is None:
            entry = self._objects[key] = _Object(version, shape)
        entry.chunks[stripe, index] = (data, crc)
        self.used += len(data) - before

    def get(
        self, key: str, version: int, stripe: int, index: int, touch: bool = True
    ) -> tuple[Buffer, int]:
        """Return a chunk and its checksum. Raises Refusal if it is not here.

        Args:
            key, version: the object.
            stripe, index: the chunk.
            touch: whether this counts as a read of the object.
        """
        entry = self._objects.get(key)
        if entry is None or entry.version != version or (stripe, index) not in entry.chunks:
            raise Refusal(
                f"The chunk ({stripe}, {index}) of version {version} of {key!r} is not here.",
                "absent",
            )
        if touch:
            entry.used = time.time()
        return entry.chunks[stripe, index]

    def has_intact(self, key: str, version: int, index: int) -> bool:
        """Return whether chunk ``index`` of every stripe of an object is here, undamaged."""
        entry = self._objects.get(key)
        if entry is None or entry.version != version:
            return False
        chunks = [entry.chunks.get((s, index)) for s in range(len(entry.shape.stripes))]
        return all(chunk is not None and isal.crc64(chunk[0]) == chunk[1] for chunk in chunks)

    def chunks(self) -> dict[tuple[str, int, int, int], Shape]:
        """Return (key, version, stripe, index) → shape of all chunks."""
        return {
            (key, o.version, stripe, index): o.shape
            for key, o in self._objects.items()
            for stripe, index in o.chunks
        }

    def drop(self, key: str, version: int) -> None:
        """Drop ``version`` and all older versions of ``key``, and refuse them from now on."""
        if version > self._dropped.get(key, 0):
            self._dropped[key] = version
            self._dropped.move_to_end(key)
            while len(self._dropped) > REMEMBERED_DROPS:
                self._dropped.popitem(last=False)
        entry = self._objects.get(key)
        if entry is not None and entry.version <= version:
            self.used -= sum(len(data) for data, _ in entry.chunks.values())
            del self._objects[key]

    def forget(self, key: str, version: int, index: int, stripe: int | None = None) -> None:
        """Drop one index of an object, which another node has now; of one stripe only if it is
        given.
        """
        entry = self._objects.get(key)
        if entry is None or entry.version != version:
            return
        for chunk in [c for c in entry.chunks if c[1] == index and stripe in (None, c[0])]:
            self.used -= len(entry.chunks.pop(chunk)[0])
        if not entry.chunks:
            del self._objects[key]

    def inventory(self) -> list[StoredObject]:
        """Return the objects with the indices that are complete."""
        objects = []
        for key, entry in self._objects.items():
            count = len(entry.shape.stripes)
            whole = [
                i
                for i in range(entry.shape.code.n)
                if all((s, i) in entry.chunks for s in range(count))
            ]
            objects.append(StoredObject(key, entry.version, entry.shape, whole, entry.used))
        return objects
