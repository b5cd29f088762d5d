"""Finds nodes with a slow link by measuring pairs of nodes, and decides which nodes a job drops
when connections between its nodes are blocked. Pure.

In a collective all ranks wait for a slow link for the same time, so busy times do not reveal it.
The throughput of one connection is that of the slower of its two links. So each node is measured
with several others. The best result is a lower bound on the throughput of its link. A link is slow
if it reaches less than half of the median with each of several partners whose own links are fast. A
partner's link is fast if it reached more with another node. :mod:`malletrain.core.slow_nodes`
decides how long the node counts as slow; :mod:`malletrain.daemon.nodes.slow_nodes` measures.

Only nodes with similar traffic are compared: the nodes of one job, or the nodes without a job. The
traffic of a job lowers the throughput measured on its nodes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

MAX_SHOWN = 3


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


def sentence(blocked: Sequence[tuple[str, str, str]]) -> str:
    """Return a description for users of the blocked connections, (from, to, reason) of each."""
    ways = [f"{a} cannot connect to {b} ({why})" for a, b, why in blocked[:MAX_SHOWN]]
    remainder = (
        f", and {len(blocked) - MAX_SHOWN} more such ways" if len(blocked) > MAX_SHOWN else ""
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


def gap_s(nodes: int, every_s: float) -> float:
    """Return the seconds between measurements with which each of ``nodes`` nodes is measured about
    every ``every_s`` seconds.
    """
    return max(MIN_INTERVAL_S, 2.0 * every_s / max(nodes, 2))
