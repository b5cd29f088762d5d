"""Objects in the client's own memory: what it read last, up to so many bytes. Pure.

Decides what is kept (least recently used goes first). Whether what is here is still the newest is
the caller's to find out, by its version.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class NearObject:
    """One object that is here."""

    version: int
    """Of the object in the cache."""
    value: bytearray
    """What it is; never changed: views of it are given away."""
    checked_at: float
    """When the cache last said that this is its newest version."""


class NearCache:
    """At most ``capacity`` bytes; larger objects are not kept."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._objects: OrderedDict[str, NearObject] = OrderedDict()
        self._reads: dict[str, set[object]] = {}
        """Those under way since the key was changed last."""

    def get(self, key: str) -> NearObject | None:
        """What is here under ``key``, which is used now."""
        if (entry := self._objects.get(key)) is not None:
            self._objects.move_to_end(key)
        return entry

    def reads(self, key: str) -> object:
        """A read of ``key`` begins; what is returned names it."""
        read = object()
        self._reads.setdefault(key, set()).add(read)
        return read

    def done(self, key: str, read: object) -> bool:
        """A read has ended; whether ``key`` was left as it was meanwhile by this process."""
        under_way = self._reads.get(key, set())
        same = read in under_way
        under_way.discard(read)
        if not under_way:
            self._reads.pop(key, None)
        return same

    def changed(self, key: str) -> None:
        """This process changes the object: neither what is here nor what is being read counts."""
        self.drop(key)
        self._reads.pop(key, None)

    def put(self, key: str, version: int, value: bytearray, now: float) -> None:
        """Keep what was read at ``now``, which nobody changes from now on."""
        self.drop(key)
        if len(value) > self.capacity:
            return
        self._objects[key] = NearObject(version, value, now)
        self.used += len(value)
        while self.used > self.capacity:
            self.drop(next(iter(self._objects)))

    def drop(self, key: str) -> None:
        """Forget it."""
        if (entry := self._objects.pop(key, None)) is not None:
            self.used -= len(entry.value)
