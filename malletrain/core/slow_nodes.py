"""Detects nodes that stay slower than their peers, and decides when to swap them out. Pure.

The ranks of a job step in lockstep, at the speed of the slowest. In each window the detector
compares each node's busy time per step, without waits, with the median of its peers. Decides which
nodes are persistently slow, how long a node counts as slow, and whether a job is faster without it.
:mod:`malletrain.training.busy` measures the work within a step; the plan decides where the job goes
instead.

A node whose link is slow (:mod:`malletrain.core.slow_links`) is remembered here, too.

Some ranks have more work than others on any node (rank 0 that evaluates, pipeline stages). If the
same rank of a job is slow on a second node, the detector ignores the job from then on and withdraws
the slow nodes that it found through it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, median_high

WINDOWS_PER_NODE, MIN_SLOW_WINDOWS = 6, 5
"""A node is persistently slow if it was slow in at least ``MIN_SLOW_WINDOWS`` of its last
``WINDOWS_PER_NODE`` windows.
"""
MAX_WINDOW_AGE_S = 1800.0
"""Older windows are ignored. If twice the detection time is longer, that limit applies instead."""
MIN_LOST_FRACTION = 0.1
"""Minimum fraction of a step that slow nodes must cost. Smaller losses are ignored."""
MAX_LOST_FRACTION = 0.95
"""Upper limit on that fraction, because step times and busy times come from different clocks."""
MAX_JOBS = 1000


@dataclass(frozen=True)
class StepShare:
    """Work of a node's slowest process in a step, averaged over a window."""

    busy_s: float
    """Busy time without waits for other ranks, seconds."""
    samples: float
    """Number of samples per step."""


@dataclass(frozen=True)
class StepWindow:
    """Step times of one round, averaged over some seconds."""

    job: str
    step_s: float
    """Duration of a step, seconds."""
    shares: Mapping[str, StepShare]
    """Node → its part of the step, in the order of ranks."""

    def slowdown(self, node: str) -> float:
        """Return the ratio of the node's busy time to the median of its peers: the smaller of the
        ratios per step and per sample. 1 for a node without peers.
        """
        node_time = self.shares[node]
        peer_times = [share for name, share in self.shares.items() if name != node]
        if not peer_times or node_time.samples <= 0 or min(o.samples for o in peer_times) <= 0:
            return 1.0
        step = median_high(o.busy_s for o in peer_times)
        sample = median_high(o.busy_s / o.samples for o in peer_times)
        if step <= 0:
            return 1.0
        return min(node_time.busy_s / step, node_time.busy_s / node_time.samples / sample)

    def saved_s(self, nodes: frozenset[str], link_times: float = 1.0) -> float:
        """Return the seconds by which a step would be shorter without these nodes.

        Args:
            link_times: ratio of the transfer time of a byte over the slowest link of these nodes to
                that over the other links. The part of a step in which no node is busy counts as
                transfer time.
        """
        slow = max((s.busy_s for name, s in self.shares.items() if name in nodes), default=0.0)
        others = max(
            (s.busy_s for name, s in self.shares.items() if name not in nodes), default=slow
        )
        waited = max(0.0, self.step_s - max(slow, others)) * (1.0 - 1.0 / link_times)
        return min(max(0.0, slow - others) + waited, MAX_LOST_FRACTION * self.step_s)


@dataclass(frozen=True)
class SlowNode:
    """Record of a slow node."""

    since: float
    """Time at which it was last detected."""
    slowdown: float
    """Ratio of its time to that of its peers at that moment."""
    sentence: str
    """Description for users."""
    link_mbit: float = 0.0
    """Throughput of the other nodes' links at that moment, Mbit/s. 0 unless the node's own link is
    the slow part.
    """

    def now(self, now: float, half_life_s: float) -> float:
        """Return the slowdown after decay: the part above 1 halves with every half-life."""
        age = max(0.0, now - self.since)
        return 1.0 + (self.slowdown - 1.0) * math.pow(0.5, age / half_life_s)

    def until(self, min_slowdown: float, half_life_s: float) -> float:
        """Return the time at which the slowdown has decayed to ``min_slowdown``."""
        halves = math.log2(max(1.0, (self.slowdown - 1.0) / (min_slowdown - 1.0)))
        return self.since + halves * half_life_s


@dataclass(frozen=True)
class Compared:
    """Result of the comparison of one window."""

    slow: Mapping[str, float]
    """The persistently slow nodes of the round → slowdown."""
    fresh: tuple[str, ...] = ()
    """Those of them that did not count as slow before."""
    uneven: bool = False
    """Whether the job's ranks have unequal work. True once per job."""
    cleared: tuple[str, ...] = ()
    """Nodes that no longer count as slow, because the job's ranks have unequal work."""


class SlowNodes:
    """The slow nodes of one machine. All times are in seconds.

    Args:
        min_slowdown: minimum slowdown of a slow node, greater than 1.
        half_life_s: time in which the recorded slowdown (its part above 1) decays to half.
        after_s: duration of :data:`WINDOWS_PER_NODE` windows.
    """

    def __init__(self, min_slowdown: float, half_life_s: float, after_s: float = 0.0) -> None:
        self._min_slowdown = min_slowdown
        self._half_life_s = half_life_s
        self._within_s = max(MAX_WINDOW_AGE_S, 2.0 * after_s)
        self._windows: dict[str, deque[tuple[float, float]]] = {}
        self._nodes: dict[str, SlowNode] = {}
        self._links: dict[str, SlowNode] = {}
        self._slow_ranks: dict[str, dict[int, str]] = {}
        self._unequal_jobs: dict[str, None] = {}

    def compare(self, window: StepWindow, now: float) -> Compared:
        """Compare the nodes in a window that has ended."""
        if window.job in self._unequal_jobs:
            return Compared({})
        slow = {}
        for node in window.shares:
            slowdowns = self._windows.setdefault(node, deque(maxlen=WINDOWS_PER_NODE))
            slowdowns.append((now, window.slowdown(node)))
            if (persistent := self._persistent_slowdown(node, now)) is not None:
                slow[node] = persistent
        if window.saved_s(frozenset(slow)) < MIN_LOST_FRACTION * window.step_s:
            return Compared({})
        places = self._slow_ranks.setdefault(window.job, {})
        order = list(window.shares)
        if any(places.get(order.index(node), node) != node for node in slow):
            return Compared({}, uneven=True, cleared=self._withdraw_job(window.job))
        places.update({order.index(node): node for node in slow})
        believed = self._still_slow(self._nodes, now)
        fresh = tuple(node for node in slow if node not in believed)
        for node, slowdown in slow.items():
            self._nodes[node] = SlowNode(now, slowdown, _sentence(node, slowdown, window))
        self._prune(now)
        return Compared(slow, fresh)

    def remember(self, node: str, slow_node: SlowNode) -> None:
        """Add a record from an earlier process, or one about the node's link."""
        (self._links if slow_node.link_mbit else self._nodes)[node] = slow_node

    def current(self, now: float) -> dict[str, SlowNode]:
        """Return the nodes that count as slow at this time."""
        return self.links(now) | self._still_slow(self._nodes, now)

    def links(self, now: float) -> dict[str, SlowNode]:
        """Return the nodes whose link counts as slow at this time."""
        return self._still_slow(self._links, now)

    def link_well(self, node: str) -> None:
        """Drop the record of a node's link: a measurement shows that it is as fast as others."""
        self._links.pop(node, None)

    def until(self, node: str) -> float:
        """Return the time until which a recorded node counts as slow."""
        records = [
            records_by_node[node]
            for records_by_node in (self._nodes, self._links)
            if node in records_by_node
        ]
        return max(record.until(self._min_slowdown, self._half_life_s) for record in records)

    def ended(self, job: str) -> None:
        """Forget a job that has ended."""
        self._slow_ranks.pop(job, None)
        self._unequal_jobs.pop(job, None)

    def _persistent_slowdown(self, node: str, now: float) -> float | None:
        recent = [slowdown for at, slowdown in self._windows[node] if now - at <= self._within_s]
        above = [slowdown for slowdown in recent if slowdown >= self._min_slowdown]
        return median(above) if len(above) >= MIN_SLOW_WINDOWS else None

    def _withdraw_job(self, job: str) -> tuple[str, ...]:
        nodes = tuple(dict.fromkeys(self._slow_ranks.pop(job, {}).values()))
        for node in nodes:
            self._nodes.pop(node, None)
            self._windows.pop(node, None)
        self._unequal_jobs[job] = None
        return nodes

    def _still_slow(self, nodes: dict[str, SlowNode], now: float) -> dict[str, SlowNode]:
        threshold = self._min_slowdown * (1 - 1e-9)
        return {n: s for n, s in nodes.items() if s.now(now, self._half_life_s) >= threshold}

    def _prune(self, now: float) -> None:
        self._nodes, self._links = self._still_slow(self._nodes, now), self.links(now)
        self._windows = {
            n: slowdowns
            for n, slowdowns in self._windows.items()
            if slowdowns and now - slowdowns[-1][0] <= self._within_s
        }
        while len(self._slow_ranks) > MAX_JOBS:
            del self._slow_ranks[next(iter(self._slow_ranks))]


def _sentence(node: str, slowdown: float, window: StepWindow) -> str:
    busy_s = window.shares[node].busy_s
    return (
        f"{node} takes {slowdown:.2f} times as long as the other nodes of its job for its part of "
        f"a step, {busy_s:.3g} s of a step of {window.step_s:.3g} s."
    )


@dataclass(frozen=True)
class Swap:
    """Inputs of the decision whether a job drops or replaces its slow nodes."""

    size: int
    """Number of nodes it has, including the slow ones."""
    slow: int
    """Number of slow nodes."""
    spare: int
    """Number of idle nodes that could replace them."""
    step_s: float
    """Duration of a step, seconds."""
    saved_s: float
    """Time by which a step is shorter without the slow nodes, seconds."""
    up_s: float
    down_s: float
    """Costs of a rescale with new nodes (``up_s``) and without (``down_s``), in seconds without
    samples.
    """
    ahead_s: float
    """Forward-looking time, seconds: a rescale must pay within it."""

    def pays(
        self, throughput: Callable[[int], float], is_valid_size: Callable[[int], bool]
    ) -> bool:
        """Return whether the job processes more samples within ``ahead_s`` without the slow nodes.

        Args:
            throughput: throughput by number of nodes.
            is_valid_size: whether the job can run on a number of nodes.
        """
        keep = self.ahead_s * throughput(self.size)
        faster = self.step_s / (self.step_s - self.saved_s)
        remaining = self.size - self.slow
        for size in range(remaining + min(self.spare, self.slow), remaining - 1, -1):
            if size > 0 and is_valid_size(size):
                cost = self.up_s if size > remaining else self.down_s
                if (self.ahead_s - cost) * throughput(size) * faster > keep:
                    return True
        return False
