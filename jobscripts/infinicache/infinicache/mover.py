"""Moves chunks for :mod:`infinicache.proxy`: has nodes fetch, forget and drop them
(:class:`Mover`), and does the background work one piece at a time, repair first, then rebalancing
(:class:`Upkeep`).

What is to be moved is decided in :mod:`infinicache.moves`; how fast, by the proxy. Here is decided
only whether a move still makes sense when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from infinicache import moves
from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.entries import Entry, Move
from infinicache.table import Table
from malletrain.waits import time_limit

ANSWER_S = 2.0
"""How long a node may take to forget something."""
log = logging.getLogger("infinicache")


class Mover:
    """Moves chunks between the nodes of ``peers``; ``table``: the proxy's of now."""

    def __init__(self, peers: Peers, table: Callable[[], Table]) -> None:
        self._peers = peers
        self._table = table
        self.moved_bytes = {"repair": 0, "rebalance": 0, "drain": 0}
        """By what they were moved for."""

    async def carry_out(self, move: Move, why: str) -> bool:
        """Have the target fetch or make a chunk; the table follows when it has it."""
        entry = self._table().objects.get(move.key)
        if (
            entry is None
            or entry.version != move.version
            or (move.source is not None and entry.at.get(move.index) != move.source)
        ):
            return False
        sources = {i: a for i, a in entry.at.items() if a in self._table().nodes}
        try:
            answer, _ = await self._peers.at(move.target).call(
                "pull",
                key=move.key,
                version=move.version,
                shape=msgspec.to_builtins(entry.shape),
                index=move.index,
                sources=sources,
                spare=entry.spare.get(move.index),
            )
        except (ConnectionLost, CallFailed) as error:
            log.info("a chunk could not be moved (%s): %s", why, error)
            return False
        self.moved_bytes[why] += answer["bytes"]
        current = self._table().objects.get(move.key)
        if (
            current is not entry
            or move.target not in self._table().nodes
            or (move.source is None and move.index in entry.at)
        ):
            await self.forget(move.target, move.key, move.version, move.index)
            return False
        self._table().set_chunk(entry, move.index, move.target)
        if move.source is not None:
            await self.forget(move.source, move.key, move.version, move.index)
        return True

    async def forget(self, address: str, key: str, version: int, index: int) -> None:
        """Have a node forget a chunk, if it answers."""
        call = self._peers.at(address).call("forget", key=key, version=version, index=index)
        with contextlib.suppress(ConnectionLost, CallFailed, asyncio.TimeoutError):
            async with time_limit(ANSWER_S):
                await call

    async def drop(self, node: str, items: list[tuple[str, int]]) -> bool:
        """Have a node drop objects (key, version); whether it answered."""
        try:
            async with time_limit(ANSWER_S):
                await self._peers.at(node).call("drop", items=items)
        except (ConnectionLost, CallFailed, asyncio.TimeoutError):
            return False
        return True


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
        """Repair one object, else move one chunk. Return the bytes that it took."""
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
