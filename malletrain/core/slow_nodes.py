"""Finds nodes that are lastingly slower than their peers, remembers them, and swaps them out. Pure.

The ranks of a job make their steps together, at the pace of the slowest. The work of each worker
within a step, without its wait for the others, is compared window by window with the median of its
peers. Decides which nodes are lastingly slow, how long a node counts as slow, and whether a job is
better off without it. :mod:`malletrain.training.busy` measures the work within a step; the plan
decides where the job goes instead.

A node whose link is slow (:mod:`malletrain.core.slow_links`) is remembered here, too.

Some ranks have more work than others wherever they run (rank 0 that evaluates, the stages of a
pipeline). So a job in which the same rank is slow on a second node is not judged any more, and its
earlier judgements are withdrawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, median_high

KEPT, ENOUGH = 6, 5
"""A node is lastingly slow when it was in so many of its last windows."""
WITHIN_S = 1800.0
"""Windows so long ago say nothing any more, or those twice as long ago as a node is compared for,
where that is longer.
"""
LEAST_SHARE = 0.1
"""Part of a step that must be lost to a slow node: less is nobody's trouble."""
MOST_SHARE = 0.95
"""Part of a step that can be lost at most: two clocks never agree."""
MOST_JOBS = 1000


@dataclass(frozen=True)
class StepShare:
    """What the slowest process of one node did in a step, on average over a window."""

    busy_s: float
    """For how long it worked itself, seconds."""
    samples: float


@dataclass(frozen=True)
class StepWindow:
    """Some seconds of one round."""

    job: str
    step_s: float
    """How long a step took, seconds."""
    shares: Mapping[str, StepShare]
    """Node → its part, in the order of ranks."""

    def slowdown(self, node: str) -> float:
        """How many times as long as its peers the node took: for a step and for a sample, whichever
        says less. 1 for a node without peers.
        """
        own = self.shares[node]
        others = [share for name, share in self.shares.items() if name != node]
        if not others or own.samples <= 0 or min(o.samples for o in others) <= 0:
            return 1.0
        step = median_high(o.busy_s for o in others)
        sample = median_high(o.busy_s / o.samples for o in others)
        if step <= 0:
            return 1.0
        return min(own.busy_s / step, own.busy_s / own.samples / sample)

    def saved_s(self, nodes: frozenset[str], link_times: float = 1.0) -> float:
        """By how much a step would be shorter without these nodes, seconds.

        Args:
            link_times: how many times as long as over the links of the others a byte takes over
                the slowest of theirs. What nobody works in a step is taken for such a wait.
        """
        slow = max((s.busy_s for name, s in self.shares.items() if name in nodes), default=0.0)
        rest = max((s.busy_s for name, s in self.shares.items() if name not in nodes), default=slow)
        waited = max(0.0, self.step_s - max(slow, rest)) * (1.0 - 1.0 / link_times)
        return min(max(0.0, slow - rest) + waited, MOST_SHARE * self.step_s)


@dataclass(frozen=True)
class SlowNode:
    """What is remembered of a node."""

    since: float
    """When it was last found slow."""
    slowdown: float
    """How many times as long as its peers it took then."""
    sentence: str
    """For people."""
    link_mbit: float = 0.0
    """What the links of the others carried then, Mbit/s, where its own is what is slow."""

    def now(self, now: float, half_life_s: float) -> float:
        """Its slowdown as it is believed now: what is above 1 halves with every half-life."""
        age = max(0.0, now - self.since)
        return 1.0 + (self.slowdown - 1.0) * math.pow(0.5, age / half_life_s)

    def until(self, least: float, half_life_s: float) -> float:
        """When no more than ``least`` is believed."""
        halves = math.log2(max(1.0, (self.slowdown - 1.0) / (least - 1.0)))
        return self.since + halves * half_life_s


@dataclass(frozen=True)
class Compared:
    """What a window led to."""

    slow: Mapping[str, float]
    """The nodes of the round that are lastingly slow → by how many times."""
    fresh: tuple[str, ...] = ()
    """Those of them that were not known to be."""
    uneven: bool = False
    """The job's ranks have unequal work; said once."""
    cleared: tuple[str, ...] = ()
    """The nodes of which it is not believed any more, for that reason."""


class SlowNodes:
    """Of one machine; times in seconds.

    Args:
        least: how many times as long as its peers a slow node takes at least, above 1.
        half_life_s: what was found so long ago is half believed.
        after_s: the time of :data:`KEPT` windows.
    """

    def __init__(self, least: float, half_life_s: float, after_s: float = 0.0) -> None:
        self._least = least
        self._half_life_s = half_life_s
        self._within_s = max(WITHIN_S, 2.0 * after_s)
        self._windows: dict[str, deque[tuple[float, float]]] = {}
        self._nodes: dict[str, SlowNode] = {}
        self._links: dict[str, SlowNode] = {}
        self._places: dict[str, dict[int, str]] = {}
        self._uneven: dict[str, None] = {}

    def compare(self, window: StepWindow, now: float) -> Compared:
        """A window of a round is over."""
        if window.job in self._uneven:
            return Compared({})
        slow = {}
        for node in window.shares:
            seen = self._windows.setdefault(node, deque(maxlen=KEPT))
            seen.append((now, window.slowdown(node)))
            if (lasting := self._lasting(node, now)) is not None:
                slow[node] = lasting
        if window.saved_s(frozenset(slow)) < LEAST_SHARE * window.step_s:
            return Compared({})
        places = self._places.setdefault(window.job, {})
        order = list(window.shares)
        if any(places.get(order.index(node), node) != node for node in slow):
            return Compared({}, uneven=True, cleared=self._take_back(window.job))
        places.update({order.index(node): node for node in slow})
        believed = self._believed(self._nodes, now)
        fresh = tuple(node for node in slow if node not in believed)
        for node, times in slow.items():
            self._nodes[node] = SlowNode(now, times, _sentence(node, times, window))
        self._forget(now)
        return Compared(slow, fresh)

    def remember(self, node: str, slow_node: SlowNode) -> None:
        """What was known before this process began, or of the node's link."""
        (self._links if slow_node.link_mbit else self._nodes)[node] = slow_node

    def current(self, now: float) -> dict[str, SlowNode]:
        """The nodes that are believed to be slow at this time."""
        return self.links(now) | self._believed(self._nodes, now)

    def links(self, now: float) -> dict[str, SlowNode]:
        """Those of them whose link is slow."""
        return self._believed(self._links, now)

    def link_well(self, node: str) -> None:
        """The link of a node was measured and is as those of others."""
        self._links.pop(node, None)

    def until(self, node: str) -> float:
        """Until when that is believed of a known node."""
        records = [of[node] for of in (self._nodes, self._links) if node in of]
        return max(one.until(self._least, self._half_life_s) for one in records)

    def ended(self, job: str) -> None:
        """The job is over."""
        self._places.pop(job, None)
        self._uneven.pop(job, None)

    def _lasting(self, node: str, now: float) -> float | None:
        seen = [times for at, times in self._windows[node] if now - at <= self._within_s]
        above = [times for times in seen if times >= self._least]
        return median(above) if len(above) >= ENOUGH else None

    def _take_back(self, job: str) -> tuple[str, ...]:
        nodes = tuple(dict.fromkeys(self._places.pop(job, {}).values()))
        for node in nodes:
            self._nodes.pop(node, None)
            self._windows.pop(node, None)
        self._uneven[job] = None
        return nodes

    def _believed(self, nodes: dict[str, SlowNode], now: float) -> dict[str, SlowNode]:
        least = self._least * (1 - 1e-9)
        return {n: s for n, s in nodes.items() if s.now(now, self._half_life_s) >= least}

    def _forget(self, now: float) -> None:
        self._nodes, self._links = self._believed(self._nodes, now), self.links(now)
        self._windows = {
            n: seen
            for n, seen in self._windows.items()
            if seen and now - seen[-1][0] <= self._within_s
        }
        while len(self._places) > MOST_JOBS:
            del self._places[next(iter(self._places))]


def _sentence(node: str, times: float, window: StepWindow) -> str:
    own = window.shares[node].busy_s
    return (
        f"{node} takes {times:.2f} times as long as the other nodes of its job for its part of a "
        f"step, {own:.3g} s of a step of {window.step_s:.3g} s."
    )


@dataclass(frozen=True)
class Swap:
    """What a job could do about its slow nodes."""

    size: int
    """The nodes it has, the slow ones among them."""
    slow: int
    spare: int
    """Nodes that nobody uses and that it could have instead."""
    step_s: float
    saved_s: float
    """By how much a step is shorter without the slow nodes, seconds."""
    up_s: float
    down_s: float
    """What it costs to change nodes with new ones among them, and to go on with those that are
    left, in seconds without samples.
    """
    ahead_s: float
    """A change must pay within it."""

    def pays(self, rate: Callable[[int], float], accepts: Callable[[int], bool]) -> bool:
        """Whether more is done by ``ahead_s`` without the slow nodes.

        Args:
            rate: throughput by number of nodes.
            accepts: whether the job runs on so many.
        """
        keep = self.ahead_s * rate(self.size)
        faster = self.step_s / (self.step_s - self.saved_s)
        remaining = self.size - self.slow
        for size in range(remaining + min(self.spare, self.slow), remaining - 1, -1):
            if size > 0 and accepts(size):
                cost = self.up_s if size > remaining else self.down_s
                if (self.ahead_s - cost) * rate(size) * faster > keep:
                    return True
        return False
