"""Which objects are read so much that the nodes that hold them cannot keep up, and what further
copies of them are called. Pure.

A pool shares its load when no node serves much more than the average one. Reads of an object of d
data chunks fall on d nodes; where that makes them busier than :data:`BUSY` average nodes, the
object is put again on others, and each read takes one of its copies. A copy is an object of its
own, under a name that no client can use and that says of which version it is a copy: it is never
read for another one.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from infinicache.entries import Entry
from infinicache.objects import CacheError
from infinicache.table import Table

WINDOW_S = 5.0
LEAST_READS = 50
"""Reads within a window, of which fewer make no object hot."""
BUSY = 2.0
MOST_COPIES = 3
_NAME = re.compile(r"\x00copy ([0-9]+) of ([0-9]+) ")


def copy_name(key: str, version: int, number: int) -> str:
    """What copy ``number`` of a version of ``key`` is called."""
    return f"\0copy {number} of {version} {key}"


def copy_names(key: str, version: int) -> list[str]:
    """What all its copies may be called."""
    return [copy_name(key, version, i) for i in range(1, MOST_COPIES + 1)]


def is_copy(key: str) -> bool:
    """Whether this is the name of a copy."""
    return _NAME.match(key) is not None


class Heat:
    """Bytes read of each object, in this window and in the last one."""

    def __init__(self) -> None:
        self._began = 0.0
        self._bytes: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._last: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def read(self, key: str, size: int, now: float) -> None:
        """One read."""
        if now - self._began >= WINDOW_S:
            quiet = now - self._began >= 2 * WINDOW_S
            self._last = (Counter(), Counter()) if quiet else (self._bytes, self._reads)
            self._bytes, self._reads = Counter(), Counter()
            self._began = now
        self._bytes[key] += size
        self._reads[key] += 1

    def copies(self, key: str, d: int, n: int, nodes: int) -> int:
        """Further copies that an object of d data chunks out of n is to have in a pool of so many
        nodes.
        """
        size, reads = self._last
        if reads[key] < LEAST_READS:
            return 0
        busy = size[key] / max(1, size.total()) * nodes / d
        return max(0, min(MOST_COPIES, int(busy / BUSY), nodes // n - 1))


def readable(entry: Entry) -> bool:
    """Whether it is there: below 0 it waits for its backups."""
    return entry.committed and entry.protection >= 0


def pick(table: Table, of: Entry, heat: Heat) -> tuple[Entry, str]:
    """An object or one of its copies, at random; and what a further copy is to be called, empty
    where there are as many as there are to be.
    """
    names = copy_names(of.key, of.version)
    there = [copy for name in names if (copy := table.objects.get(name)) is not None]
    chosen = random.choice([of, *(copy for copy in there if readable(copy))])
    target = heat.copies(of.key, of.shape.d, of.shape.code.n, len(table.usable()))
    another = next(n for n in names if n not in table.objects) if len(there) < target else ""
    return chosen, another


def like(table: Table, key: str, copy: str) -> tuple[list[int], int, set[str]]:
    """Code and stripes of what is to be copied, and the nodes that have it or a copy already.
    Raises CacheError where it is not there any more.
    """
    of = table.objects.get(key)
    if of is None or not of.committed or copy not in copy_names(key, of.version):
        raise CacheError(f"{key!r} was replaced, so that no copy of it is of use.")
    names = (key, *copy_names(key, of.version))
    there = [entry for name in names if (entry := table.objects.get(name)) is not None]
    nodes = {node for entry in there for node in entry.at.values()}
    return [of.shape.d, of.shape.target_p], of.shape.stripe_bytes, nodes
