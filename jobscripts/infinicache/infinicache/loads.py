"""Decides whether a proxy stores what a client has loaded after a miss: not if the key was put or
deleted since, because that is newer.
"""

from __future__ import annotations

import math
import os
import time

from infinicache.entries import Entry

MAX_KNOWN_DELETIONS = 10_000
"""Maximum number of keys whose deletion is remembered."""


class Loads:
    """The deletions of one proxy, and the moments of its misses."""

    def __init__(self) -> None:
        self._id = os.urandom(8).hex()
        self._deleted: dict[str, float] = {}
        """When keys were deleted (time.monotonic), the latest last."""

    def miss(self) -> tuple[str, float]:
        """Return what identifies this moment to this proxy: the client that misses a key returns
        it with what it has loaded.
        """
        return self._id, time.monotonic()

    def missed_at(self, loaded_s: float, miss: tuple[str, float] | None) -> float:
        """Return when the client missed a key (time.monotonic).

        Args:
            loaded_s: how long ago, as the client has counted; its request was under way since.
            miss: what :meth:`miss` has returned to it, perhaps of another proxy.
        """
        if miss is not None and miss[0] == self._id:
            return miss[1]
        return time.monotonic() - loaded_s

    def delete(self, key: str) -> None:
        """Record that a key is deleted now."""
        self._deleted.pop(key, None)
        self._deleted[key] = time.monotonic()
        while len(self._deleted) > MAX_KNOWN_DELETIONS:
            del self._deleted[next(iter(self._deleted))]

    def changed_since(self, key: str, entry: Entry | None, moment: float) -> bool:
        """Return whether a key was put, or deleted, after this moment (time.monotonic). A put that
        is under way then counts if it has ended since. ``entry``: what is under the key.
        """
        put_at = 0.0 if entry is None else entry.version / 1e9  # versions are times
        committed_at = -math.inf if entry is None else entry.committed_at
        age_s = time.monotonic() - moment
        return (
            put_at > time.time() - age_s
            or max(committed_at, self._deleted.get(key, -math.inf)) > moment
        )
