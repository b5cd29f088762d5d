"""Moves chunks for :mod:`infinicache.proxy`: requests nodes to fetch, forget and drop them
(:class:`Mover`), and does the background work piece by piece, repair before rebalancing
(:class:`Upkeep`).

:mod:`infinicache.moves` decides which chunks move, and the proxy how fast. This module only decides
whether a completed move is still valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from infinicache import moves
from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.entries import Entry, Move
from infinicache.table import Table
from malletrain.waits import time_limit
from scavenger.backoff import doubled_s

ANSWER_TIMEOUT_S = 2.0
"""Maximum time in which a node answers a request to forget or drop chunks, seconds."""
FIRST_RETRY_S, MAX_RETRY_S = 10.0, 600.0
"""Time after which a repair that has failed is repeated, seconds: the first and the maximum. It
doubles each time.
"""
INTACT_S, MAX_INTACT = 5.0, 10_000
"""Time for which a chunk that its node has undamaged is not checked again, seconds, and the number
of such chunks above which older ones are forgotten: a client that can read nothing reports each
chunk with each read.
"""
MOVE_TIMEOUT_S = 90.0
"""Maximum time of a move besides that of its bytes, seconds: two sources may not answer."""
MIN_MOVE_BYTES_S = 5e6
"""Minimum rate at which a node gets chunks, bytes per second."""
log = logging.getLogger("infinicache")


class Mover:
    """Moves chunks between the nodes of ``peers``. ``table``: returns the proxy's current table."""

    def __init__(self, peers: Peers, table: Callable[[], Table]) -> None:
        self._peers = peers
        self._table = table
        self.undropped: dict[str, dict[str, int]] = {}
        """Node → objects that it was to drop and has not answered about: key → version."""
        self._intact_at: dict[tuple[str, str, int, int], float] = {}
        """(node, key, version, index) of a chunk → when it was undamaged, seconds."""
        self.moved_bytes = {"repair": 0, "rebalance": 0, "drain": 0}
        """Purpose of a move → moved bytes."""

    async def carry_out(self, move: Move, why: str) -> bool:
        """Let the target fetch or rebuild a chunk, and update the table when it has the chunk.
        Return whether the move succeeded. ``why``: a key of ``moved_bytes``.
        """
        entry = self._table().objects.get(move.key)
        if (
            entry is None
            or entry.version != move.version
            or (move.source is not None and entry.at.get(move.index) != move.source)
        ):
            return False
        sources = {i: a for i, a in entry.at.items() if a in self._table().nodes}
        within_s = MOVE_TIMEOUT_S + move.bytes * entry.shape.d / MIN_MOVE_BYTES_S
        try:
            async with time_limit(within_s):
                answer, _ = await self._peers.at(move.target).call(
                    "pull",
                    key=move.key,
                    version=move.version,
                    shape=msgspec.to_builtins(entry.shape),
                    index=move.index,
                    sources=sources,
                    spare=entry.spare.get(move.index),
                )
        except (ConnectionLost, CallFailed, asyncio.TimeoutError) as error:
            log.info("a chunk could not be moved (%s): %s", why, error or f"in {within_s:.0f} s")
            if entry.at.get(move.index) != move.target:  # it may have the chunk, or a part of it
                await self.forget(move.target, move.key, move.version, move.index)
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
        """Let a node forget a chunk. Does nothing if the node does not answer."""
        call = self._peers.at(address).call("forget", key=key, version=version, index=index)
        with contextlib.suppress(ConnectionLost, CallFailed, asyncio.TimeoutError):
            async with time_limit(ANSWER_TIMEOUT_S):
                await call

    async def is_alive(self, address: str) -> bool:
        """Return whether a node answers."""
        call = self._peers.at(address).call("health")
        try:
            async with time_limit(ANSWER_TIMEOUT_S):
                await call
        except CallFailed:  # it has not done what it was asked, and is there
            return True
        except (ConnectionLost, asyncio.TimeoutError):
            return False
        return True

    async def intact(self, node: str, key: str, version: int, indices: Sequence[int]) -> set[int]:
        """Return which of these chunks a node has undamaged, or had some seconds ago; of those to
        be checked none if it does not answer.
        """
        now = time.monotonic()
        recent = {
            i
            for i in indices
            if now - self._intact_at.get((node, key, version, i), -math.inf) < INTACT_S
        }
        rest = [i for i in indices if i not in recent]
        if not rest:
            return recent
        call = self._peers.at(node).call("check", key=key, version=version, indices=rest)
        try:
            async with time_limit(ANSWER_TIMEOUT_S):
                answer, _ = await call
        except (ConnectionLost, CallFailed, asyncio.TimeoutError):
            return recent
        if len(self._intact_at) > MAX_INTACT:
            self._intact_at = {c: at for c, at in self._intact_at.items() if now - at < INTACT_S}
        self._intact_at |= {(node, key, version, i): now for i in answer["intact"]}
        return recent | set(answer["intact"])

    async def drop(self, node: str, items: list[tuple[str, int]]) -> bool:
        """Let a node drop objects (key, version). Return whether it has answered."""
        try:
            async with time_limit(ANSWER_TIMEOUT_S):
                await self._peers.at(node).call("drop", items=items)
        except (ConnectionLost, CallFailed, asyncio.TimeoutError):
            nodes = self._table().nodes  # one may have left meanwhile
            self.undropped = {n: waiting for n, waiting in self.undropped.items() if n in nodes}
            if node in nodes:
                waiting = self.undropped.setdefault(node, {})
                for key, version in items:
                    waiting[key] = max(version, waiting.get(key, 0))
            return False
        return True

    async def drop_again(self, node: str) -> None:
        """Let a node that is heard of again drop what it has not answered about."""
        if items := self.undropped.pop(node, None):
            await self.drop(node, [*items.items()])


@dataclass(frozen=True)
class _Retry:
    """The next attempt to repair an object. ``at``: its time, seconds. ``failures``: number of
    attempts before it.
    """

    at: float
    failures: int


class Upkeep:
    """The objects that wait for repair.

    Args:
        mover: moves the chunks.
        drop: lets the nodes drop objects.
        clock: returns the time, seconds.
    """

    def __init__(
        self,
        mover: Mover,
        drop: Callable[[Sequence[Entry]], Awaitable[Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mover = mover
        self._drop = drop
        self._clock = clock
        self._waiting: deque[str] = deque()
        self._retries: dict[str, _Retry] = {}
        """Objects whose repair has failed → the next attempt."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._retries)

    def add(self, entries: Iterable[Entry]) -> None:
        """Queue degraded objects for repair."""
        self._waiting.extend(entry.key for entry in entries)

    def find_degraded(self, table: Table) -> None:
        """Find all degraded objects, and queue those with the least protection first."""
        degraded = [e for e in table.objects.values() if e.protection < e.shape.p]
        self._waiting = deque(e.key for e in sorted(degraded, key=lambda e: e.protection))

    async def one_piece(self, table: Table) -> int:
        """Repair one object; if none waits, repeat one repair that has failed; if none is due, move
        one chunk. Return the number of bytes that this has transferred, or may have.
        """
        while self._waiting:
            entry = table.objects.get(self._waiting.popleft())
            if entry is None or not entry.committed:
                continue
            if done := await self._repair(table, entry):
                return done
        due = self._due(table)
        if due is not None and (done := await self._repair(table, due)):
            return done
        move = moves.rebalance(table)
        if move is not None and await self._mover.carry_out(move, "rebalance"):
            return move.bytes
        return 0

    def _due(self, table: Table) -> Entry | None:
        """Return the object whose next attempt is due first; None if there is none."""
        entries = {key: table.objects.get(key) for key in self._retries}
        for key, entry in entries.items():
            if entry is None or not entry.committed:  # deleted, or put again
                del self._retries[key]
        if not self._retries:
            return None
        first = min(self._retries, key=lambda key: self._retries[key].at)
        return entries[first] if self._retries[first].at <= self._clock() else None

    async def _repair(self, table: Table, entry: Entry) -> int:
        """Make the missing chunks of an object. Return the number of bytes that this has
        transferred, or may have: a move that fails may do so with its last byte.
        """
        done, has_failed = 0, False
        todo = moves.repair(table, entry)
        # Chunks with a copy first: the others may be rebuilt from them.
        for move in sorted(todo, key=lambda m: m.index not in entry.spare):
            copied = move.source is not None or move.index in entry.spare
            is_moved = await self._mover.carry_out(move, "repair")
            if is_moved or table.objects.get(entry.key) is entry:
                done += move.bytes * (1 if copied else entry.shape.d)
            has_failed |= not is_moved
        retry = self._retries.pop(entry.key, _Retry(0.0, 0))
        if has_failed and table.objects.get(entry.key) is entry:
            pause_s = doubled_s(FIRST_RETRY_S, retry.failures, MAX_RETRY_S)
            self._retries[entry.key] = _Retry(self._clock() + pause_s, retry.failures + 1)
        if todo and entry.protection < 0 and table.objects.get(entry.key) is entry:
            table.remove(entry.key)  # its backups are missing or too old
            table.lost += 1
            await self._drop([entry])
        return done
