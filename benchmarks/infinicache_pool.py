"""Simulates one pool of the cache on one trace of idle nodes, for
:mod:`benchmarks.infinicache_replay`.

The product's own :mod:`infinicache.table` decides placement, eviction, backups, repair and drains.
Time is modelled: a joiner is ready after 5 s; repair and drains take as long as their bytes need; a
copy exists after its node's turn.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.infinicache_requests import Request
from malletrain.sim.settings import Forecaster, Foresight, forecaster
from scavenger.trace import trace as traces

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobscripts" / "infinicache"))

from infinicache import moves
from infinicache.availability import PoolChange, expected_losses
from infinicache.backup import peer_of
from infinicache.codec import STRIPE_BYTES, Code, code_for
from infinicache.entries import Entry
from infinicache.objects import TooLarge, Unavailable
from infinicache.placement import Prospect, departure_groups_of
from infinicache.table import Table

JOIN_S, GRACE_S, SETTLE_S = 5.0, 30.0, 1.0
MOVE_BYTES_S, NODE_BYTES_S = 200e6, 1e9
"""Rate of repair of the pool (the product's default), and of the hand-over of one node, bytes per
second.
"""
LOOK_S = 10.0
FORECAST_EVERY_S = 60.0
SUDDEN = {
    "never": 0.0,
    "30 s of notice": 0.0,
    "1 in 10 without": 0.1,
    "all without": 1.0,
    "random nodes, without": 1.0,
}
"""Kind of preemption → the share of departures without notice. ``never``: an upper bound for this
memory. ``random nodes``: as many nodes as in the trace at the same times, but others, as in the
hypergeometric model.
"""


@dataclass(frozen=True)
class Way:
    """Settings of the cache."""

    name: str
    apart: bool = False
    """Whether nodes with a common rack or arrival are known."""
    foresight: Foresight = "none"
    """Source of the forecasts of how long nodes stay."""
    backup_s: float = 0.0
    """Interval of the copies to a peer, seconds; half of the memory is for copies."""
    reserve: float = 0.0
    """Share of the memory that puts leave free."""
    room: bool = True
    """Whether room is made for the chunks of leavers."""
    whole: bool = False
    """Whether objects are whole on one node: nodes that are never taken need no parity."""


@dataclass
class Replay:
    """One pool."""

    memory: int
    limit: int
    preemption: str
    way: Way
    begin: float
    """Start in the trace of idle nodes, seconds."""
    forecaster: Forecaster | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(11))

    def __post_init__(self) -> None:
        self.table = Table(self.rng, self.way.reserve)
        self.idle: dict[str, float] = {}
        self.now = 0.0
        self.allowance = 0.0
        self.repairs: deque[str] = deque()
        self.prospects: dict[str, float] = {}
        self.forecast_at = self.copied_at = -1e9
        self.peers: dict[str, str] = {}
        self.fresh: dict[str, set[tuple[str, int, int]]] = {}
        """Node → (key, version, index) without a copy at its peer."""
        self.counts: dict[str, float] = dict.fromkeys(
            (
                *("gets", "hits", "bytes", "hit_bytes", "refused", "repair_bytes"),
                *("drain_bytes", "backup_bytes", "expected", "losses", "notices"),
            ),
            0.0,
        )
        self.node_s = self.used_s = 0.0
        self.changes: list[PoolChange] = []
        self.together: list[tuple[int, int]] = []
        """(nodes in the pool, nodes lost) of each loss."""

    # --- time ---

    def advance(self, now: float) -> None:
        """Advance the time: integrate the memory, and continue repairs."""
        dt = now - self.now
        self.node_s += dt * len(self.table.nodes)
        self.used_s += dt * sum(n.reserved for n in self.table.nodes.values())
        self.now = now
        self.allowance = (
            min(self.allowance + dt * MOVE_BYTES_S, 60 * MOVE_BYTES_S) if self.repairs else 0.0
        )
        while self.repairs and self.allowance > 0:
            entry = self.table.objects.get(self.repairs.popleft())
            if entry is not None:
                self.repair(entry)

    def repair(self, entry: Entry) -> None:
        """Repair an object as far as nodes have room."""
        for move in sorted(
            moves.repair(self.table, entry), key=lambda m: m.index not in entry.spare
        ):
            copied = bool(move.source) or move.index in entry.spare
            if not copied and len(entry.at) < entry.shape.d:
                continue
            self.place(entry, move.index, move.target)
            moved = move.bytes * (1 if copied else entry.shape.d)
            self.counts["repair_bytes"] += moved
            self.allowance -= moved

    def place(self, entry: Entry, index: int, node: str | None) -> None:
        """Move a chunk."""
        self.table.set_chunk(entry, index, node)
        if node is not None and self.way.backup_s:
            self.fresh.setdefault(node, set()).add((entry.key, entry.version, index))

    def look(self) -> None:
        """Do the regular work: let idle nodes join, forecast lifetimes, make copies."""
        if self.forecaster is not None and self.now - self.forecast_at >= FORECAST_EVERY_S:
            self.forecast_at = self.now
            since = {n: s + self.begin for n, s in self.idle.items()}
            self.forecaster.update(since, self.now + self.begin)
            forecasts = self.forecaster.forecasts(self.now + self.begin)
            self.prospects = {n: forecast.horizon_s for n, forecast in forecasts.items()}
            for node in self.table.nodes:
                self.table.add_node(node, self.memory, self.prospect(node))
        if self.way.backup_s and self.now - self.copied_at >= self.way.backup_s:
            self.copied_at = self.now
            self.copy()
        self.fill()

    def prospect(self, node: str) -> Prospect:
        """Return the prospect of a node."""
        entry = self.table.nodes.get(node)
        departure_groups = departure_groups_of(node, f"{self.now:.0f}") if self.way.apart else ()
        return Prospect(
            self.prospects.get(node, float("inf") if self.forecaster is None else 60.0),
            entry.prospect.departure_groups if entry is not None else departure_groups,
        )

    def copy(self) -> None:
        """Copy the new chunks of every node to its peer."""
        for node in self.table.nodes:
            peer = peer_of(self.table.nodes, node, self.peers.get(node))
            if peer is None:
                continue
            fresh = self.fresh.get(node, set())
            if self.peers.get(node) != peer:
                fresh = {
                    (key, self.table.objects[key].version, index)
                    for key, indices in self.table.nodes[node].chunks.items()
                    for index in indices
                }
            for key, version, _ in fresh:
                entry = self.table.objects.get(key)
                if entry is not None and entry.version == version:
                    self.counts["backup_bytes"] += entry.shape.share
            self.peers[node] = peer
            self.fresh[node] = set()

    # --- nodes ---

    def fill(self) -> None:
        """Let idle nodes that have started join, up to the limit: those idle longest first."""
        joined = []
        for node, since in sorted(self.idle.items(), key=lambda item: item[1]):
            if len(self.table.nodes) >= self.limit or since + JOIN_S > self.now:
                break
            if node not in self.table.nodes:
                self.table.add_node(node, self.memory, self.prospect(node))
                joined.append(node)
        if joined:
            self.changes.append(PoolChange(self.now, joined=tuple(joined)))
            degraded = [e for e in self.table.objects.values() if e.protection < e.shape.p]
            self.repairs = deque(e.key for e in sorted(degraded, key=lambda e: e.protection))

    def take(self, nodes: list[str]) -> None:
        """Remove nodes that become busy. Those with notice hand over what the time allows."""
        if self.preemption == "never" and self.table.nodes:
            return
        mine = [n for n in nodes if n in self.table.nodes]
        if self.preemption.startswith("random"):
            mine = self.rng.sample(sorted(self.table.nodes), len(mine))
            nodes = [*(n for n in nodes if n not in self.table.nodes), *mine]
        for node in nodes:
            self.idle.pop(node, None)
        sudden = [n for n in mine if self.rng.random() < SUDDEN[self.preemption]]
        notified = [n for n in mine if n not in sudden]
        for node in notified:
            self.counts["notices"] += 1
            self.table.nodes[node].leaving = True
        if notified and self.way.room:
            moves.make_room_for_leavers(self.table)
        for node in notified:
            self.drain(node)
        if sudden:
            self.counts["losses"] += len(sudden)
            self.together.append((len(self.table.nodes), len(sudden)))
            objects = [
                (len(set(e.at.values())), e.protection)
                for e in self.table.objects.values()
                if e.protection >= 0  # otherwise the object waits for its copies
            ]
            self.counts["expected"] += (
                expected_losses(objects, len(self.table.nodes), len(sudden)) if objects else 0.0
            )
            self.changes.append(PoolChange(self.now, lost=tuple(sudden)))
        for node in sudden:
            self.lose(node, set(sudden))

    def drain(self, node: str) -> None:
        """Hand over chunks within the grace time; the rest is lost with the node."""
        budget_bytes = GRACE_S * NODE_BYTES_S
        for move in moves.drain(self.table, node):
            if move.bytes > budget_bytes:
                break
            budget_bytes -= move.bytes
            entry = self.table.objects[move.key]
            self.table.set_chunk(entry, move.index, None)
            self.place(entry, move.index, move.target)
            self.counts["drain_bytes"] += move.bytes
        self.lose(node, set())

    def lose(self, node: str, with_it: set[str]) -> None:
        """Remove a node. Its peer has the copies unless it leaves too."""
        peer = self.peers.pop(node, None)
        fresh = self.fresh.pop(node, set())
        saved = peer if peer in self.table.nodes and peer not in with_it else None
        degraded, _ = self.table.lose_node(node, saved)
        for entry in degraded:
            missing = {
                i for key, version, i in fresh if (key, version) == (entry.key, entry.version)
            }
            entry.spare = {i: n for i, n in entry.spare.items() if i not in missing}
            if entry.unrecoverable:
                self.table.remove(entry.key)
                self.table.lost += 1
            else:
                self.repairs.append(entry.key)

    # --- requests ---

    def request(self, request: Request) -> None:
        """Handle a client's request: a get that misses is followed by a put."""
        entry = self.table.objects.get(request.key)
        if not request.put:
            self.counts["gets"] += 1
            self.counts["bytes"] += request.size
            if entry is not None and entry.shape.size == request.size and entry.protection >= 0:
                self.counts["hits"] += 1
                self.counts["hit_bytes"] += request.size
                self.table.touch(entry)
                return
        self.table.remove(request.key)
        code = Code(1, 0) if self.way.whole else code_for(request.size)
        version = self.table.newest + 1
        try:
            made = self.table.begin(request.key, request.size, code, STRIPE_BYTES, version, [])
        except (TooLarge, Unavailable):
            self.counts["refused"] += 1
            return
        made.committed = True
        if self.way.backup_s:
            for index, node in made.at.items():
                self.fresh.setdefault(node, set()).add((made.key, made.version, index))


class NodeChange(NamedTuple):
    """Nodes that become idle or are taken at one time."""

    time: float
    """Seconds from the beginning of the part of the trace; negative before it."""
    is_idle: bool
    names: list[str]


def node_changes(
    idle: traces.Trace,
    begin: float,
    seconds: float,
    before: Callable[[dict[str, float], float], None] = lambda idle_since, at: None,
) -> tuple[dict[str, float], list[NodeChange]]:
    """Return the changes of nodes in a part of a trace. Departures within :data:`SETTLE_S` of the
    first count as one, at the end of that time or of the part, whichever is earlier.

    Args:
        idle: the trace.
        begin: beginning of the part, seconds of the trace.
        seconds: its length.
        before: called after each change before the part, with the idle nodes, the times at which
            they became idle, and the time, all in seconds from ``begin``.

    Returns:
        The idle nodes at the beginning → the time at which each became idle, in that order; and the
        later changes, in order of time.
    """
    since: dict[str, float] = {}
    changes: list[NodeChange] = []
    pending: list[str] = []
    opened = 0.0

    def settle() -> None:
        if pending:
            changes.append(NodeChange(min(opened + SETTLE_S, seconds), False, pending))

    for batch in idle.batches():
        at = batch.time - begin
        if at > seconds:
            break
        became_idle, busy = ([idle.names[k] for k in each] for each in (batch.idle, batch.busy))
        if at < 0:
            for name in busy:
                since.pop(name, None)
            since.update(dict.fromkeys(became_idle, at))
            before(since, at)
            continue
        if became_idle:
            changes.append(NodeChange(at, True, became_idle))
        if busy:
            if at - opened > SETTLE_S:
                settle()
                pending = []
            opened = opened if pending else at
            pending = pending + busy
    settle()
    return since, sorted(changes, key=lambda change: change.time)


def replay(
    requests: list[Request],
    idle: traces.Trace,
    span: tuple[float, float],
    pool: tuple[int, int],
    preemption: str,
    way: Way,
) -> tuple[Replay, dict[str, Any]]:
    """Replay requests on a pool. Return the results.

    Args:
        span: part of the trace of idle nodes: first second, and number of seconds.
        pool: memory of each node, bytes, and maximum number of nodes.
    """
    begin, seconds = span
    lent = pool[0] // 2 if way.backup_s else pool[0]
    made = Replay(lent, pool[1], preemption, way, begin, forecaster(way.foresight, idle))
    forecast_at = -1e9

    def learn(idle_since: dict[str, float], at: float) -> None:
        nonlocal forecast_at
        if made.forecaster is not None and at - forecast_at >= FORECAST_EVERY_S:
            forecast_at = at
            made.forecaster.update({n: s + begin for n, s in idle_since.items()}, at + begin)

    made.idle, changes = node_changes(idle, begin, seconds, learn)
    node_events: list[tuple[float, int, Any]] = [(change.time, 0, change) for change in changes]
    events: list[tuple[float, int, Any]] = [(r.time, 1, r) for r in requests]
    looks = [(LOOK_S * t, 2, None) for t in range(int(seconds / LOOK_S))]
    for time_s, kind, what in heapq.merge(node_events, events, looks, key=lambda e: (e[0], e[1])):
        made.advance(time_s)
        if kind == 1:
            made.request(what)
        elif kind == 0 and not what.is_idle:
            made.take(what.names)
        elif kind == 0:
            for node in what.names:
                made.idle.setdefault(node, time_s)
        else:
            made.look()
    made.advance(seconds)
    return made, _account(made, pool[0])


def _account(made: Replay, memory: int) -> dict[str, Any]:
    c: Mapping[str, float] = made.counts
    return {
        "gets": int(c["gets"]),
        "hit_ratio": c["hits"] / max(1, c["gets"]),
        "byte_hit_ratio": c["hit_bytes"] / max(1, c["bytes"]),
        "lost_objects": made.table.lost,
        "evicted": made.table.evicted,
        "refused": int(c["refused"]),
        "expected_lost": c["expected"],
        "nodes_lost": int(c["losses"]),
        "nodes_drained": int(c["notices"]),
        "repair_gb": c["repair_bytes"] / 1e9,
        "drain_gb": c["drain_bytes"] / 1e9,
        "backup_gb": c["backup_bytes"] / 1e9,
        "lent_gb_h": made.node_s * memory / 3600e9,
        "used_gb_h": made.used_s / 3600e9,
        "hits_per_node_h": c["hits"] / max(1e-9, made.node_s / 3600),
        "hit_gb_per_node_h": c["hit_bytes"] / 1e9 / max(1e-9, made.node_s / 3600),
    }
