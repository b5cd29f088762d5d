"""Decides which objects are read so often that their nodes cannot keep up, and how copies of them
are named. Pure.

The load of a pool is balanced if no node serves much more than the average one. Reads of an object
with d data chunks fall on d nodes. If each of these has more than :data:`MAX_LOAD_FACTOR` times the
average load, the object is put again on other nodes, and each read uses one of the copies. A copy
is an object of its own. Its name cannot be used by clients and contains the version that it is a
copy of, so that it is never read in place of another version.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from infinicache.entries import Entry
from infinicache.objects import CacheError
from infinicache.table import Table

WINDOW_S = 5.0
MIN_READS = 50
"""Minimum number of reads of a hot object within a window."""
MAX_LOAD_FACTOR = 2.0
MAX_COPIES = 3
_NAME = re.compile(r"\x00copy ([0-9]+) of ([0-9]+) ")


def copy_name(key: str, version: int, number: int) -> str:
    """Return the name of copy ``number`` of a version of ``key``."""
    return f"\0copy {number} of {version} {key}"


def copy_names(key: str, version: int) -> list[str]:
    """Return the names that copies of a version of ``key`` can have."""
    return [copy_name(key, version, i) for i in range(1, MAX_COPIES + 1)]


def is_copy(key: str) -> bool:
    """Return whether this is the name of a copy."""
    return _NAME.match(key) is not None


def original_of(key: str) -> str:
    """Return the key of the object of which this is the name of a copy, or the key itself."""
    name = _NAME.match(key)
    return key if name is None else key[name.end() :]


class ReadLoad:
    """Bytes read of each object, in this window and in the last one."""

    def __init__(self) -> None:
        self._began = 0.0
        self._bytes: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._last: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def read(self, key: str, size: int, now: float) -> None:
        """Record a read."""
        if now - self._began >= WINDOW_S:
            quiet = now - self._began >= 2 * WINDOW_S
            self._last = (Counter(), Counter()) if quiet else (self._bytes, self._reads)
            self._bytes, self._reads = Counter(), Counter()
            self._began = now
        self._bytes[key] += size
        self._reads[key] += 1

    def copies(self, key: str, d: int, n: int, nodes: int) -> int:
        """Return how many copies an object should have beside the original.

        Args:
            key: name of the object.
            d: number of its data chunks.
            n: number of all its chunks.
            nodes: number of nodes of the pool.
        """
        size, reads = self._last
        if reads[key] < MIN_READS:
            return 0
        busy = size[key] / max(1, size.total()) * nodes / d
        return max(0, min(MAX_COPIES, int(busy / MAX_LOAD_FACTOR), nodes // n - 1))


def readable(entry: Entry) -> bool:
    """Return whether the object can be read now. With a protection below 0 it waits for its
    backups.
    """
    return entry.committed and entry.protection >= 0


def choose_copy(table: Table, of: Entry, read_load: ReadLoad) -> tuple[Entry, str]:
    """Return the object or one of its copies, chosen at random, and the name of the next copy to
    make; empty if there are enough copies.
    """
    names = copy_names(of.key, of.version)
    copies = [copy for name in names if (copy := table.objects.get(name)) is not None]
    chosen = random.choice([of, *(copy for copy in copies if readable(copy))])
    target = read_load.copies(of.key, of.shape.d, of.shape.code.n, len(table.usable()))
    next_name = next(n for n in names if n not in table.objects) if len(copies) < target else ""
    return chosen, next_name


def copy_source(table: Table, key: str, copy: str) -> tuple[list[int], int, set[str]]:
    """Return the code and the stripe size of the original of a copy, and the nodes that already
    have the object or a copy. Raises CacheError if the original does not exist any more.
    """
    of = table.objects.get(key)
    if of is None or not of.committed or copy not in copy_names(key, of.version):
        raise CacheError(f"{key!r} was replaced; a copy of the old version is useless.")
    names = (key, *copy_names(key, of.version))
    copies = [entry for name in names if (entry := table.objects.get(name)) is not None]
    nodes = {node for entry in copies for node in entry.at.values()}
    return [of.shape.d, of.shape.target_p], of.shape.stripe_bytes, nodes
