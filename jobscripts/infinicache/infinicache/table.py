"""A proxy's memory: which node holds which chunk of which object, what is free, what goes first.
Pure: no sockets, no clock.

Decides where chunks go (random distinct nodes with room), which objects are evicted (CLOCK, whole
objects), what follows from the loss of a node, in which order a leaver hands over, and which chunks
move to a new node. Bytes are reserved when a put begins, so that two puts cannot both have the last
room.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from infinicache.codec import Code, fit
from infinicache.objects import HeldObject, Shape, TooLarge, Unavailable


@dataclass
class PoolNode:
    """One cache node. ``reserved``: bytes placed there; ``held``: key → indices of its chunks
    there.
    """

    capacity: int
    reserved: int = 0
    leaving: bool = False
    held: dict[str, set[int]] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Bytes that may still be placed there."""
        return self.capacity - self.reserved


@dataclass
class Entry:
    """One object. ``at``: index → node; ``spare``: index → node with a backup of a lost chunk.
    ``touched``: CLOCK's bit; ``reads``: for telling what is most valuable.
    """

    key: str
    version: int
    shape: Shape
    at: dict[int, str] = field(default_factory=dict)
    spare: dict[int, str] = field(default_factory=dict)
    committed: bool = False
    touched: bool = True
    reads: int = 0

    @property
    def protection(self) -> int:
        """Nodes that may be lost, whichever they are; below 0 when the object cannot be read."""
        left = len(self.at) - self.shape.d
        if left <= 0:
            return left
        nodes = 0
        for chunks in sorted(Counter(self.at.values()).values(), reverse=True):
            left -= chunks
            if left < 0:
                break
            nodes += 1
        return nodes

    @property
    def hopeless(self) -> bool:
        """Whether it is lost for good: the backups of its lost chunks do not make up for them."""
        return len(self.at) + len(self.spare.keys() - self.at.keys()) < self.shape.d


@dataclass(frozen=True)
class Move:
    """Chunk ``index`` of an object to ``target``: from ``source``, or rebuilt from the others where
    there is none.
    """

    key: str
    version: int
    index: int
    source: str | None
    target: str
    bytes: int


class Table:
    """The mapping of one pool."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.nodes: dict[str, PoolNode] = {}
        self.objects: dict[str, Entry] = {}
        self.newest = 0
        """The highest version seen."""
        self.lost = 0
        """Objects lost with their nodes."""
        self.evicted = 0
        self._clock: OrderedDict[str, None] = OrderedDict()
        self._rng = rng or random.Random()

    # --- nodes ---

    def add_node(self, address: str, capacity: int) -> None:
        """A node, empty as far as is known."""
        if address not in self.nodes:
            self.nodes[address] = PoolNode(capacity)

    def lose_node(self, address: str, backup: str | None = None) -> tuple[list[Entry], list[Entry]]:
        """The node is gone with its chunks: the objects that are degraded, and those that are lost
        (and forgotten).

        ``backup``: the node that may have copies of its chunks.
        """
        gone = self.nodes.pop(address, None)
        degraded, lost = [], []
        for key, indices in gone.held.items() if gone else ():
            entry = self.objects[key]
            entry.spare = {i: node for i, node in entry.spare.items() if node != address}
            for index in indices:
                del entry.at[index]
                if backup in self.nodes:
                    entry.spare[index] = str(backup)
            if not entry.committed:
                continue
            if entry.hopeless:
                lost.append(entry)
                self.remove(entry.key)
            else:
                degraded.append(entry)
        self.lost += len(lost)
        return degraded, lost

    def reconcile(
        self, address: str, held: Iterable[HeldObject]
    ) -> tuple[list[Entry], list[Entry]]:
        """A known node says anew what it holds: what is not there any more counts as lost, as in
        :meth:`lose_node`.
        """
        there = {(h.key, h.version): set(h.indices) for h in held}
        degraded, lost = [], []
        for key, indices in list(self.nodes[address].held.items()):
            entry = self.objects[key]
            missing = indices - there.get((key, entry.version), set())
            if not missing or not entry.committed:  # a put may be under way
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
        """Nodes that take chunks."""
        return [a for a, n in self.nodes.items() if not n.leaving]

    # --- objects ---

    def begin(
        self,
        key: str,
        size: int,
        wanted: Code,
        stripe_bytes: int,
        version: int,
        evicted: list[Entry],
    ) -> Entry:
        """Place a new object. What has to be evicted for it is added to ``evicted``, to be dropped
        on the nodes first.

        The previous version of ``key`` must have been removed. Raises Unavailable without nodes,
        TooLarge when it would not even fit alone.
        """
        usable = self.usable()
        if not usable:
            raise Unavailable("The cache has no nodes now.")
        code = fit(wanted, len(usable))
        shape = Shape(size, code.d, code.p, stripe_bytes, wanted.p)
        share = shape.share
        if sum(self.nodes[a].capacity >= share for a in usable) < code.n:
            largest = sorted((self.nodes[a].capacity for a in usable), reverse=True)[code.n - 1]
            raise TooLarge(
                f"An object of {size} bytes in {code} needs {share} bytes on each of {code.n} "
                f"nodes, but they have {largest} each at most."
            )
        while True:
            room = [a for a in usable if self.nodes[a].free >= share]
            if len(room) >= code.n:
                break
            victim = self._victim()
            if victim is None:
                raise TooLarge(
                    f"An object of {size} bytes does not fit now: what is in the cache is still "
                    "being written."
                )
            self.remove(victim.key)
            self.evicted += 1
            evicted.append(victim)
        self.newest = max(self.newest, version)
        entry = self.objects[key] = Entry(key, version, shape)
        self._clock[key] = None
        for index, node in enumerate(self._rng.sample(room, code.n)):
            self.set_chunk(entry, index, node)
        return entry

    def remove(self, key: str) -> Entry | None:
        """Forget an object and its reservations."""
        entry = self.objects.pop(key, None)
        if entry is None:
            return None
        del self._clock[key]
        for node in entry.at.values():
            if node in self.nodes:
                self.nodes[node].reserved -= entry.shape.share
                self.nodes[node].held.pop(key, None)
        return entry

    def touch(self, entry: Entry) -> None:
        """It was read."""
        entry.touched, entry.reads = True, entry.reads + 1

    def _victim(self) -> Entry | None:
        """CLOCK: the first object that was not read since the hand last passed. The hand is the
        front of the queue.
        """
        for _ in range(2 * len(self._clock)):
            entry = self.objects[next(iter(self._clock))]
            if entry.committed and not entry.touched:
                return entry
            entry.touched = entry.touched and not entry.committed
            self._clock.move_to_end(entry.key)
        return None

    def set_chunk(self, entry: Entry, index: int, node: str | None) -> None:
        """Chunk ``index`` is on ``node`` now; None: nowhere."""
        before = entry.at.pop(index, None)
        if before in self.nodes:
            self.nodes[before].reserved -= entry.shape.share
            self.nodes[before].held[entry.key].discard(index)
            if not self.nodes[before].held[entry.key]:
                del self.nodes[before].held[entry.key]
        if node is not None and node in self.nodes:
            entry.spare.pop(index, None)
            entry.at[index] = node
            self.nodes[node].reserved += entry.shape.share
            self.nodes[node].held.setdefault(entry.key, set()).add(index)

    # --- after a loss of this memory ---

    def restore(
        self, address: str, held: Iterable[HeldObject], settled: bool
    ) -> list[tuple[str, str, int]]:
        """Take over what a node says it holds. Returns (node, key, version) of what is to be
        dropped: overtaken, or, once ``settled``, anything that is not known (it was deleted or
        evicted while the node could not be reached).
        """
        stale: list[tuple[str, str, int]] = []
        for h in held:
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
        """All nodes have said what they hold: objects with enough chunks count, the others are
        forgotten and returned.

        An older version cannot come back: the newest one that left any trace is the only one looked
        at.
        """
        half = [e for e in self.objects.values() if not e.committed and e.protection < 0]
        for entry in half:
            self.remove(entry.key)
        for entry in self.objects.values():
            entry.committed = True
        return half

    # --- moving chunks ---

    def repair(self, entry: Entry) -> list[Move]:
        """Where the missing chunks of an object are to be made anew, and those that share a node
        are to go, as far as there are other nodes with room.
        """
        missing: list[tuple[int, str | None]] = [
            (i, None) for i in range(entry.shape.code.n) if i not in entry.at
        ]
        seen: set[str] = set()
        for index, node in entry.at.items():
            if node in seen:
                missing.append((index, node))
            seen.add(node)
        targets = self._targets(entry, len(missing))
        return [
            Move(entry.key, entry.version, i, node, t, entry.shape.share)
            for (i, node), t in zip(missing, targets, strict=False)
        ]

    def drain(self, address: str) -> list[Move]:
        """What a leaver hands over, most valuable first: objects that its going would bring nearest
        to their end, then those read most.

        Where no other node is without a chunk of the object, chunks share a node: better two of
        them at one place than none.
        """
        leaver = self.nodes.get(address)
        held = (
            [
                (self.objects[key], i)
                for key, indices in leaver.held.items()
                for i in sorted(indices)
            ]
            if leaver
            else []
        )
        held = [(e, i) for e, i in held if e.committed]
        held.sort(key=lambda c: (c[0].protection, -c[0].reads, c[0].shape.share))
        moves, planned = [], dict.fromkeys(self.nodes, 0)
        for entry, index in held:
            targets = self._targets(entry, 1, planned) or self._shared(entry, planned)
            if targets:
                planned[targets[0]] += entry.shape.share
                moves.append(
                    Move(entry.key, entry.version, index, address, targets[0], entry.shape.share)
                )
        return moves

    def rebalance(self, slack: float = 0.1) -> Move | None:
        """The next chunk to move from the fullest node to the emptiest, None when they differ by
        less than ``slack`` of the capacity.
        """
        usable = sorted(
            self.usable(), key=lambda a: self.nodes[a].reserved / max(1, self.nodes[a].capacity)
        )
        if len(usable) < 2:
            return None
        low, high = usable[0], usable[-1]
        gap = self.nodes[high].reserved - self.nodes[low].reserved
        best: tuple[Entry, int] | None = None
        if gap <= slack * self.nodes[high].capacity:
            return None
        for key, indices in self.nodes[high].held.items():
            entry, index = self.objects[key], min(indices)
            share = entry.shape.share
            if (
                not entry.committed
                or key in self.nodes[low].held
                or 2 * share > gap
                or share > self.nodes[low].free
            ):
                continue
            if best is None or share > best[0].shape.share:
                best = (entry, index)
        return (
            Move(best[0].key, best[0].version, best[1], high, low, best[0].shape.share)
            if best
            else None
        )

    def _shared(self, entry: Entry, planned: dict[str, int]) -> list[str]:
        """The node with the fewest chunks of an object among those with room."""
        share = entry.shape.share
        room = [a for a in self.usable() if self.nodes[a].free - planned.get(a, 0) >= share]
        return sorted(
            room, key=lambda a: (len(self.nodes[a].held.get(entry.key, ())), planned.get(a, 0))
        )[:1]

    def _targets(
        self, entry: Entry, count: int, planned: dict[str, int] | None = None
    ) -> list[str]:
        extra = planned or {}
        share = entry.shape.share
        room = [
            a
            for a in self.usable()
            if a not in entry.at.values() and self.nodes[a].free - extra.get(a, 0) >= share
        ]
        self._rng.shuffle(room)
        room.sort(
            key=lambda a: (
                (self.nodes[a].reserved + extra.get(a, 0)) / max(1, self.nodes[a].capacity)
            )
        )
        return room[:count]
