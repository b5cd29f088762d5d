"""Detects nodes that slow down the others of their job, by their speed or by a slow link, and
decides when to swap them out. Pure.

The ranks of a job step in lockstep, at the speed of the slowest. In each window the detector
compares each node's busy time per step, without waits, with the median of its peers. Decides which
nodes are persistently slow, how long a node counts as slow, and whether a job is faster without it.
:mod:`malletrain.training.step_times` measures the work within a step; the plan decides where the
job goes instead.

Some ranks have more work than others on any node (rank 0 that evaluates, pipeline stages). If the
same rank of a job is slow on a second node, the detector ignores the job from then on and withdraws
the slow nodes that it found through it.

In a collective all ranks wait for a slow link for the same time, so busy times do not reveal it.
The throughput of one connection is that of the slower of its two links. So each node is measured
with several others. The best result is a lower bound on the throughput of its link. A link is slow
if it reaches less than half of the median with each of several partners whose own links are fast. A
partner's link is fast if it reached more with another node.
:mod:`malletrain.daemon.nodes.slow_nodes` measures. Only nodes with similar traffic are compared:
the nodes of one job, or the nodes without a job. The traffic of a job lowers the throughput
measured on its nodes.

Decides also which nodes a job drops when connections between its nodes are blocked.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low

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


MAX_SHOWN_CONNECTIONS = 3


def left_out(members: Sequence[str], blocked: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the members to drop so that all connections between the others work. A greedy choice
    keeps their number small.

    Args:
        members: nodes in rank order. Of equal candidates the later one is dropped.
        blocked: (from, to) of each blocked connection.
    """
    pairs, dropped = {pair for pair in blocked if set(pair) <= set(members)}, []
    while pairs:
        ends = Counter(node for pair in pairs for node in pair)
        worst = max(members, key=lambda node: (ends[node], members.index(node)))
        dropped.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(dropped)


def describe_blocked(blocked: Sequence[tuple[str, str, str]]) -> str:
    """Return a description for users of the blocked connections, (from, to, reason) of each."""
    ways = [f"{a} cannot connect to {b} ({why})" for a, b, why in blocked[:MAX_SHOWN_CONNECTIONS]]
    remainder = (
        f", and {len(blocked) - MAX_SHOWN_CONNECTIONS} more such ways"
        if len(blocked) > MAX_SHOWN_CONNECTIONS
        else ""
    )
    return f"{'; '.join(ways)}{remainder}. Are ports between the nodes blocked by a firewall?"


MIN_PARTNERS = 3
"""Minimum number of partners with normal links that a slow node was measured with."""
MIN_SLOWDOWN = 2.0
"""Minimum ratio of the median, and of the slowest normal link, to a slow link. If the measurements
spread without a break, as on busy processors, no link counts as slow.
"""
MAX_RECOVERED_SLOWDOWN, RECOVERED_MEASUREMENTS = 1.5, 2
"""A link has recovered when its last ``RECOVERED_MEASUREMENTS`` measurements are all at least the
median divided by ``MAX_RECOVERED_SLOWDOWN``.
"""
MAX_SLOWDOWN = 100.0
MEASUREMENTS_PER_NODE = 6
"""Number of measurements kept per node. A node needs all of them to count as slow. The best one is
the estimate of its link, because other traffic lowers single measurements.
"""
MAX_MEASUREMENT_AGE_S = 4 * 3600.0
"""Older measurements are ignored."""
MIN_INTERVAL_S = 1.0
"""Minimum time between the starts of two measurements, seconds."""


@dataclass(frozen=True)
class LinkRate:
    """Throughput of one connection between two nodes."""

    partner: str
    """The other node."""
    group: str
    """Job of both nodes, or the group of nodes without a job."""
    mbit: float
    """Throughput, Mbit/s."""
    at: float
    """Time of the measurement."""


@dataclass(frozen=True)
class SlowLink:
    """A node whose link is slow."""

    mbit: float
    """Its best measurement, Mbit/s."""
    usual: float
    """Median of the best measurements of the nodes in its group, Mbit/s."""
    partners: int
    """Number of partners with normal links with which it was measured."""

    @property
    def times(self) -> float:
        """Ratio of the transfer time of a byte over this link to that over a median link."""
        return min(MAX_SLOWDOWN, self.usual / max(self.mbit, 1e-9))

    def sentence(self, node: str) -> str:
        """Return a description for users."""
        return (
            f"The link of {node} carries {self.mbit:.3g} Mbit/s at most, measured with "
            f"{self.partners} other nodes; {self.usual:.3g} Mbit/s is usual among them."
        )


class SlowLinks:
    """The measurements of one machine; times in seconds."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[LinkRate]] = {}
        """Newest measurements by node."""

    def measured(self, a: str, b: str, group: str, mbit: float, now: float) -> None:
        """Add the measured throughput of a connection between ``a`` and ``b``, Mbit/s."""
        for node, partner in ((a, b), (b, a)):
            rates = self._rates.setdefault(node, deque(maxlen=MEASUREMENTS_PER_NODE))
            rates.append(LinkRate(partner, group, mbit, now))

    def keep(self, nodes: Iterable[str]) -> None:
        """Drop the measurements of all other nodes."""
        present = set(nodes)
        self._rates = {node: rates for node, rates in self._rates.items() if node in present}

    def slow(self, group: str, members: Sequence[str], now: float) -> dict[str, SlowLink]:
        """Return the members of a group whose links are slow."""
        rates = {node: self._recent(node, group, now) for node in members}
        best = {node: max(r.mbit for r in of) for node, of in rates.items() if of}
        if len(best) <= MIN_PARTNERS:
            return {}
        usual = median_low(best.values())
        normal = {node for node, mbit in best.items() if mbit * MIN_SLOWDOWN >= usual}
        slowest = min(best[node] for node in normal)
        slow = {}
        for node in best.keys() - normal:
            partners = len(normal & {r.partner for r in rates[node]})
            clearly_slower = best[node] * MIN_SLOWDOWN <= slowest
            if (
                clearly_slower
                and partners >= MIN_PARTNERS
                and len(rates[node]) == MEASUREMENTS_PER_NODE
            ):
                slow[node] = SlowLink(best[node], usual, partners)
        return slow

    def well(self, node: str, usual: float, since: float) -> bool:
        """Return whether a slow link has recovered: its newest measurements are all later than
        ``since`` and close to ``usual`` (Mbit/s).
        """
        newest = list(self._rates.get(node, ()))[-RECOVERED_MEASUREMENTS:]
        return len(newest) == RECOVERED_MEASUREMENTS and all(
            r.at > since and r.mbit * MAX_RECOVERED_SLOWDOWN >= usual for r in newest
        )

    def next_pair(
        self, groups: Mapping[str, Sequence[str]], host_of: Callable[[str], str] = str
    ) -> tuple[str, str, str] | None:
        """Return the next pair to measure: (group, node, partner). The node is the one measured
        least recently; the partner is the member of its group on another host that it was measured
        with least recently. None if there is no such pair.

        Args:
            groups: group → its nodes.
            host_of: returns the host of a node. No link is between slots of one host.
        """
        due = [
            (self._last_measured_at(node), k, group, node)
            for group, members in groups.items()
            if len(set(map(host_of, members))) > 1
            for k, node in enumerate(members)
        ]
        if not due:
            return None
        _, _, group, node = min(due)
        last_measured = {r.partner: r.at for r in self._rates.get(node, ())}

        def sort_key(k: int) -> tuple[float, float, int]:
            other = groups[group][k]
            return (last_measured.get(other, -math.inf), self._last_measured_at(other), k)

        host = host_of(node)
        others = [k for k, other in enumerate(groups[group]) if host_of(other) != host]
        return group, node, groups[group][min(others, key=sort_key)]

    def _last_measured_at(self, node: str) -> float:
        rates = self._rates.get(node)
        return rates[-1].at if rates else -math.inf

    def _recent(self, node: str, group: str, now: float) -> list[LinkRate]:
        rates = self._rates.get(node, ())
        return [r for r in rates if r.group == group and now - r.at <= MAX_MEASUREMENT_AGE_S]


def measuring_interval_s(nodes: int, every_s: float) -> float:
    """Return the seconds between measurements with which each of ``nodes`` nodes is measured about
    every ``every_s`` seconds.
    """
    return max(MIN_INTERVAL_S, 2.0 * every_s / max(nodes, 2))
