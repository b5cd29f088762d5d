"""Consistent hashing: which of several proxies a key belongs to. When one is added or taken away
only its share of the keys moves.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right

POINTS = 64


class Ring:
    """``slots`` proxies, numbered from 0, with POINTS points each on a ring of 2**64."""

    def __init__(self, slots: int) -> None:
        points = sorted(
            (_hash(f"proxy {slot} point {i}"), slot) for slot in range(slots) for i in range(POINTS)
        )
        self._at = [at for at, _ in points]
        self._slots = [slot for _, slot in points]

    def slot(self, key: str) -> int:
        """The proxy of ``key``."""
        return self._slots[bisect_right(self._at, _hash(key)) % len(self._slots)]


def _hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )
