"""A proxy's background work, one piece at a time: repair first, then rebalancing.

What is to be moved is decided in :mod:`infinicache.moves`; how fast, by the proxy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from infinicache import moves
from infinicache.entries import Entry
from infinicache.mover import Mover
from infinicache.table import Table


class Upkeep:
    """The objects that wait for repair. ``drop``: has the nodes drop objects."""

    def __init__(self, mover: Mover, drop: Callable[[Sequence[Entry]], Awaitable[Any]]) -> None:
        self._mover = mover
        self._drop = drop
        self._waiting: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def soon(self, entries: Iterable[Entry]) -> None:
        """These are degraded."""
        self._waiting.extend(entry.key for entry in entries)

    def look(self, table: Table) -> None:
        """Find all that are degraded, those first that can least do without."""
        degraded = [e for e in table.objects.values() if e.protection < e.shape.p]
        self._waiting = deque(e.key for e in sorted(degraded, key=lambda e: e.protection))

    async def one_piece(self, table: Table) -> int:
        """Repair one object, else move one chunk. Returns the bytes that it took."""
        while self._waiting:
            entry = table.objects.get(self._waiting.popleft())
            if entry is None or not entry.committed:
                continue
            if done := await self._repair(table, entry):
                return done
        away = moves.rebalance(table)
        if away is not None and await self._mover.carry_out(away, "rebalance"):
            return away.bytes
        return 0

    async def _repair(self, table: Table, entry: Entry) -> int:
        done = 0
        todo = moves.repair(table, entry)
        # Copies first: the others may need them.
        for move in sorted(todo, key=lambda m: m.index not in entry.spare):
            copied = move.source is not None or move.index in entry.spare
            if await self._mover.carry_out(move, "repair"):
                done += move.bytes * (1 if copied else entry.shape.d)
        if todo and entry.protection < 0 and table.objects.get(entry.key) is entry:
            table.remove(entry.key)  # its backups were not there, or too old
            table.lost += 1
            await self._drop([entry])
        return done
