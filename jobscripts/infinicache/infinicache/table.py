"""The table of a proxy: which node has which chunk of which object, how much memory is free, and
which object is evicted first. Pure: no sockets, no clock.

Decides which nodes have room for chunks, which objects are evicted (CLOCK, whole objects) and what
follows from the loss of a node. :mod:`infinicache.placement` decides which of the nodes get the
chunks, and :mod:`infinicache.moves` which chunks move. Memory is reserved when a put begins, so
that two puts cannot both get the last room.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

from infinicache.codec import Code, fit
from infinicache.entries import Entry, PoolNode
from infinicache.objects import Shape, StoredObject, TooLarge, Unavailable
from infinicache.placement import NO_PROSPECT, Prospect, choose


class Table:
    """The table of one pool.

    Args:
        rng: source of random choices.
        reserve: share of each node's memory that puts leave free, for the chunks of leavers and for
            repairs.
    """

    def __init__(self, rng: random.Random | None = None, reserve: float = 0.0) -> None:
        self.nodes: dict[str, PoolNode] = {}
        self.objects: dict[str, Entry] = {}
        self.newest = 0
        """The highest version so far."""
        self.lost = 0
        """Number of objects that were lost with their nodes."""
        self.evicted = 0
        self._clock: OrderedDict[str, None] = OrderedDict()
        self.rng = rng or random.Random()
        self._reserve = reserve

    # --- nodes ---

    def add_node(self, address: str, capacity: int, prospect: Prospect = NO_PROSPECT) -> None:
        """Add an empty node. If the node is known, only its prospect is updated."""
        self.nodes.setdefault(address, PoolNode(capacity)).prospect = prospect

    def lose_node(self, address: str, backup: str | None = None) -> tuple[list[Entry], list[Entry]]:
        """Remove a lost node with its chunks. Return the objects that are degraded, and those that
        are lost and removed. ``backup``: the node that may have copies of its chunks.
        """
        lost_node = self.nodes.pop(address, None)
        degraded, lost = [], []
        for key, indices in lost_node.chunks.items() if lost_node else ():
            entry = self.objects[key]
            entry.spare = {i: node for i, node in entry.spare.items() if node != address}
            for index in indices:
                del entry.at[index]
                if backup in self.nodes:
                    entry.spare[index] = str(backup)
            if not entry.committed:
                continue
            if entry.unrecoverable:
                lost.append(entry)
                self.remove(entry.key)
            else:
                degraded.append(entry)
        self.lost += len(lost)
        return degraded, lost

    def reconcile(
        self, address: str, inventory: Iterable[StoredObject]
    ) -> tuple[list[Entry], list[Entry]]:
        """Update a known node with its new inventory. A chunk that is missing there counts as lost,
        as in :meth:`lose_node`. Return as that does.
        """
        present_chunks = {(h.key, h.version): set(h.indices) for h in inventory}
        degraded, lost = [], []
        for key, indices in list(self.nodes[address].chunks.items()):
            entry = self.objects[key]
            missing = indices - present_chunks.get((key, entry.version), set())
            if not missing or not entry.committed:  # the object may be part of a put in progress
                continue
            for index in missing:
                self.set_chunk(entry, index, None)
            if entry.protection < 0:
                lost.append(entry)
                self.remove(entry.key)
            else:
                degraded.append(entry)
        self.lost += len(lost)
        return degraded, lost

    def usable(self) -> list[str]:
        """Return the nodes that accept chunks."""
        return [a for a, n in self.nodes.items() if not n.leaving]

    # --- objects ---

    def begin(
        self,
        key: str,
        size: int,
        target: Code,
        stripe_bytes: int,
        version: int,
        evicted: list[Entry],
        elsewhere: Collection[str] = (),
    ) -> Entry:
        """Place a new object. The previous version of ``key`` must have been removed.

        Args:
            key, size, stripe_bytes, version: the object.
            code: the requested code.
            evicted: gets the objects that are evicted for it. The nodes must drop them first.
            elsewhere: nodes that get no chunk of it if there are enough others.

        Raises:
            Unavailable: there are no nodes.
            TooLarge: the object does not fit even into an empty cache.
        """
        usable = self.usable()
        if not usable:
            raise Unavailable("The cache has no nodes now.")
        code = fit(target, len(usable))
        shape = Shape(size, code.d, code.p, stripe_bytes, target.p)
        share = shape.share
        if sum(self._for_puts(a) >= share for a in usable) < code.n:
            largest = sorted((self._for_puts(a) for a in usable), reverse=True)[code.n - 1]
            raise TooLarge(
                f"An object of {size} bytes in {code} needs {share} bytes on each of {code.n} "
                f"nodes, but they have {largest} each at most."
            )
        while True:
            room = [a for a in usable if self._for_puts(a) - self.nodes[a].reserved >= share]
            if len(room) >= code.n:
                break
            victim = self._victim()
            if victim is None:
                raise TooLarge(
                    f"An object of {size} bytes does not fit now: what is in the cache is still "
                    "being written."
                )
            self.evict(victim)
            evicted.append(victim)
        self.newest = max(self.newest, version)
        entry = self.objects[key] = Entry(key, version, shape)
        self._clock[key] = None
        others = [a for a in room if a not in elsewhere]
        room = others if len(others) >= code.n else room
        prospects = {a: self.nodes[a].prospect for a in room}
        for index, node in enumerate(choose(room, code.n, prospects, {}, self.rng)):
            self.set_chunk(entry, index, node)
        return entry

    def _for_puts(self, address: str) -> int:
        """Return the memory of a node that puts may use, bytes."""
        return int(self.nodes[address].capacity * (1.0 - self._reserve))

    def remove(self, key: str) -> Entry | None:
        """Remove an object and its reservations."""
        entry = self.objects.pop(key, None)
        if entry is None:
            return None
        del self._clock[key]
        for node in entry.at.values():
            if node in self.nodes:
                self.nodes[node].reserved -= entry.shape.share
                self.nodes[node].chunks.pop(key, None)
        return entry

    def discard(self, entry: Entry) -> None:
        """Forget this object, if no other one has its key by now."""
        if self.objects.get(entry.key) is entry:
            self.remove(entry.key)

    def evict(self, entry: Entry) -> None:
        """Remove an object because there is no room for it."""
        self.remove(entry.key)
        self.evicted += 1

    def touch(self, entry: Entry) -> None:
        """Record a read of the object."""
        entry.touched, entry.reads = True, entry.reads + 1

    def _victim(self) -> Entry | None:
        """Return the object to evict (CLOCK): the first one that was not read since the hand last
        passed it. The hand is the front of the queue.
        """
        for _ in range(2 * len(self._clock)):
            entry = self.objects[next(iter(self._clock))]
            if entry.committed and not entry.touched:
                return entry
            entry.touched = entry.touched and not entry.committed
            self._clock.move_to_end(entry.key)
        return None

    def set_chunk(self, entry: Entry, index: int, node: str | None) -> None:
        """Record that chunk ``index`` is on ``node``; None: nowhere."""
        before = entry.at.pop(index, None)
        if before in self.nodes:
            self.nodes[before].reserved -= entry.shape.share
            self.nodes[before].chunks[entry.key].discard(index)
            if not self.nodes[before].chunks[entry.key]:
                del self.nodes[before].chunks[entry.key]
        if node is not None and node in self.nodes:
            entry.spare.pop(index, None)
            entry.at[index] = node
            self.nodes[node].reserved += entry.shape.share
            self.nodes[node].chunks.setdefault(entry.key, set()).add(index)

    def summary(self) -> dict[str, Any]:
        """Return the counts of nodes, objects and bytes."""
        entries = self.objects.values()
        return {
            "nodes": {a: [n.reserved, n.capacity, n.leaving] for a, n in self.nodes.items()},
            "objects": len(entries),
            "bytes": sum(e.shape.size for e in entries),
            "degraded": sum(e.protection < e.shape.p for e in entries),
            "weak": sum(e.shape.p < e.shape.target_p for e in entries),
            "lost": self.lost,
            "evicted": self.evicted,
        }

    # --- after a loss of this table ---

    def restore(
        self, address: str, inventory: Iterable[StoredObject], settled: bool
    ) -> list[tuple[str, str, int]]:
        """Record the chunks that a node reports. Return (node, key, version) of what has to be
        dropped: old versions, and, once ``settled``, unknown objects (they were deleted or evicted
        while the node could not be reached).
        """
        stale: list[tuple[str, str, int]] = []
        for h in inventory:
            self.newest = max(self.newest, h.version)
            entry = self.objects.get(h.key)
            overtaken = entry is not None and (
                entry.version > h.version or (settled and entry.version < h.version)
            )
            if overtaken or (entry is None and settled):
                stale.append((address, h.key, h.version))
                continue
            if entry is None or entry.version < h.version:
                if entry is not None:
                    stale += [(node, h.key, entry.version) for node in entry.at.values()]
                self.remove(h.key)
                entry = self.objects[h.key] = Entry(h.key, h.version, h.shape, touched=False)
                self._clock[h.key] = None
            for index in h.indices:
                if index not in entry.at:
                    self.set_chunk(entry, index, address)
        return stale

    def settle(self) -> list[Entry]:
        """End the wait for registrations: keep the objects with enough chunks, and remove and
        return the others. An older version cannot return, because only the newest version of which
        any chunk was reported is considered.
        """
        half = [e for e in self.objects.values() if not e.committed and e.protection < 0]
        for entry in half:
            self.remove(entry.key)
        for entry in self.objects.values():
            entry.committed = True
        return half
