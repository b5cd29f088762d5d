"""Decides which chunks of a pool move: those that are rebuilt, those that a leaver hands over, and
those that a newcomer gets. Pure: reads the table, and changes it only by evictions.
"""

from __future__ import annotations

from infinicache.entries import Entry, Move
from infinicache.placement import choose
from infinicache.table import Table


def repair(table: Table, entry: Entry) -> list[Move]:
    """Return the moves that rebuild the missing chunks of an object and separate chunks that share
    a node, as far as other nodes have room.
    """
    missing: list[tuple[int, str | None]] = [
        (i, None) for i in range(entry.shape.code.n) if i not in entry.at
    ]
    seen: set[str] = set()
    for index, node in entry.at.items():
        if node in seen:
            missing.append((index, node))
        seen.add(node)
    targets = _targets(table, entry, len(missing))
    return [
        Move(entry.key, entry.version, i, node, t, entry.shape.share)
        for (i, node), t in zip(missing, targets, strict=False)
    ]


def make_room_for_leavers(table: Table) -> list[Entry]:
    """Evict objects until the staying nodes have room for all chunks of the leavers. The objects
    with the fewest reads per byte are evicted first; whole objects are worth more than parts of
    many. Return the evicted objects.
    """
    nodes = table.nodes.values()
    needed = sum(n.reserved for n in nodes if n.leaving)
    staying = [n for n in nodes if not n.leaving]
    free = sum(n.free for n in staying)
    if not staying or needed <= free:
        return []
    evicted = []
    for entry in sorted(table.objects.values(), key=_worth):
        if not entry.committed:
            continue
        for node in entry.at.values():
            if table.nodes[node].leaving:
                needed -= entry.shape.share
            else:
                free += entry.shape.share
        table.evict(entry)
        evicted.append(entry)
        if needed <= free:
            break
    return evicted


def drain(table: Table, address: str) -> list[Move]:
    """Return the moves of a leaver, the most valuable chunk first: objects that this departure
    would bring closest to their loss, then those with the most reads.

    If all other nodes have a chunk of the object already, the chunk is moved to one of them.
    """
    leaver = table.nodes.get(address)
    chunks = (
        [(table.objects[key], i) for key, indices in leaver.chunks.items() for i in sorted(indices)]
        if leaver
        else []
    )
    chunks = [(e, i) for e, i in chunks if e.committed]
    chunks.sort(key=lambda c: (c[0].protection, -c[0].reads, c[0].shape.share))
    moves, planned = [], dict.fromkeys(table.nodes, 0)
    for entry, index in chunks:
        targets = _targets(table, entry, 1, planned) or _shared(table, entry, planned)
        if targets:
            planned[targets[0]] += entry.shape.share
            moves.append(
                Move(entry.key, entry.version, index, address, targets[0], entry.shape.share)
            )
    return moves


def rebalance(table: Table, slack: float = 0.1) -> Move | None:
    """Return the next move from the fullest node to the emptiest; None if their use differs by less
    than ``slack`` of the capacity.
    """
    usable = sorted(
        table.usable(), key=lambda a: table.nodes[a].reserved / max(1, table.nodes[a].capacity)
    )
    if len(usable) < 2:
        return None
    low, high = usable[0], usable[-1]
    gap = table.nodes[high].reserved - table.nodes[low].reserved
    best: tuple[Entry, int] | None = None
    if gap <= slack * table.nodes[high].capacity:
        return None
    for key, indices in table.nodes[high].chunks.items():
        entry, index = table.objects[key], min(indices)
        share = entry.shape.share
        if (
            not entry.committed
            or key in table.nodes[low].chunks
            or 2 * share > gap
            or share > table.nodes[low].free
        ):
            continue
        if best is None or share > best[0].shape.share:
            best = (entry, index)
    return (
        Move(best[0].key, best[0].version, best[1], high, low, best[0].shape.share)
        if best
        else None
    )


def _shared(table: Table, entry: Entry, planned: dict[str, int]) -> list[str]:
    """Return, of the nodes with room, the one with the fewest chunks of an object."""
    share = entry.shape.share
    room = [a for a in table.usable() if table.nodes[a].free - planned.get(a, 0) >= share]
    return sorted(
        room, key=lambda a: (len(table.nodes[a].chunks.get(entry.key, ())), planned.get(a, 0))
    )[:1]


def _targets(
    table: Table, entry: Entry, count: int, planned: dict[str, int] | None = None
) -> list[str]:
    extra = planned or {}
    share = entry.shape.share
    room = [
        a
        for a in table.usable()
        if a not in entry.at.values() and table.nodes[a].free - extra.get(a, 0) >= share
    ]
    fullness = {
        a: (table.nodes[a].reserved + extra.get(a, 0)) / max(1, table.nodes[a].capacity)
        for a in room
    }
    present_nodes = [a for a in entry.at.values() if a in table.nodes]
    prospects = {a: table.nodes[a].prospect for a in (*room, *present_nodes)}
    return choose(room, count, prospects, fullness, table.rng, present_nodes)


def _worth(entry: Entry) -> float:
    """Return the reads per byte of memory."""
    return (1 + entry.reads) / max(1, entry.shape.share)
