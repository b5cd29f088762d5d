"""Has nodes fetch, forget and drop chunks, for :mod:`infinicache.proxy`.

Decides nothing but whether a move still makes sense when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.entries import Move
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
