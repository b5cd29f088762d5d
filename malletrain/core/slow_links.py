"""Finds nodes with a slow link by measuring pairs of nodes. Pure.

In a collective all ranks wait alike for a slow link, so the work of a rank does not show it. The
throughput of one connection is that of the slower of its two links. So each node is measured with
several others, and its link carries at least the best of the results. A link is slow if it gets
less than half of what is usual with each of several partners that are known to be fine, because
they got more with another node. :mod:`malletrain.core.slow_nodes` decides how long that is
believed; :mod:`malletrain.daemon.slow_links` measures.

Only nodes with like traffic are compared, those of one job or those without a job: the traffic of a
job reduces what is measured on its nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

LEAST_PARTNERS = 3
"""With so many fine partners a slow node was measured at least."""
LEAST_TIMES = 2.0
"""A slow link carries less than what is usual, and than any that is not slow, by this: where
measurements are smeared, as on busy processors, nobody stands apart.
"""
WELL_TIMES, WELL = 1.5, 2
"""Who was slow is well again when so many measurements in a row miss what was usual by no more."""
MOST_TIMES = 100.0
KEPT = 6
"""Measurements of each node that are kept; a slow node has so many, and the best of them says how
fast its link is: whatever else the node does in that moment makes single ones worse.
"""
WITHIN_S = 4 * 3600.0
"""Older measurements say nothing any more."""
LEAST_GAP_S = 1.0
"""From the begin of one measurement to that of the next."""


@dataclass(frozen=True)
class LinkRate:
    """What one connection of a node to another carried."""

    partner: str
    group: str
    mbit: float
    at: float


@dataclass(frozen=True)
class SlowLink:
    """A node whose link is slow."""

    mbit: float
    """The best that it was measured with, Mbit/s."""
    usual: float
    """The median of the best of its group, Mbit/s."""
    partners: int

    @property
    def times(self) -> float:
        """How many times as long as over a usual link a byte takes."""
        return min(MOST_TIMES, self.usual / max(self.mbit, 1e-9))

    def sentence(self, node: str) -> str:
        """For people."""
        return (
            f"The link of {node} carries {self.mbit:.3g} Mbit/s at most, measured with "
            f"{self.partners} other nodes; {self.usual:.3g} Mbit/s is usual among them."
        )


class SlowLinks:
    """The measurements of one machine; times in seconds."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[LinkRate]] = {}
        """Of each node the newest."""

    def measured(self, a: str, b: str, group: str, mbit: float, now: float) -> None:
        """One connection between both carried so much, Mbit/s."""
        for node, partner in ((a, b), (b, a)):
            rates = self._rates.setdefault(node, deque(maxlen=KEPT))
            rates.append(LinkRate(partner, group, mbit, now))

    def keep(self, nodes: Iterable[str]) -> None:
        """Forget of all other nodes what was measured at them."""
        present = set(nodes)
        self._rates = {node: rates for node, rates in self._rates.items() if node in present}

    def slow(self, group: str, members: Sequence[str], now: float) -> dict[str, SlowLink]:
        """Those of the members of a group whose links are slow."""
        rates = {node: self._recent(node, group, now) for node in members}
        best = {node: max(r.mbit for r in of) for node, of in rates.items() if of}
        if len(best) <= LEAST_PARTNERS:
            return {}
        usual = median_low(best.values())
        fine = {node for node, mbit in best.items() if mbit * LEAST_TIMES >= usual}
        slowest = min(best[node] for node in fine)
        slow = {}
        for node in best.keys() - fine:
            partners = len(fine & {r.partner for r in rates[node]})
            apart = best[node] * LEAST_TIMES <= slowest
            if apart and partners >= LEAST_PARTNERS and len(rates[node]) == KEPT:
                slow[node] = SlowLink(best[node], usual, partners)
        return slow

    def well(self, node: str, usual: float, since: float) -> bool:
        """Whether a slow node's newest measurements, made after it was last found slow, come near
        to what was usual then, Mbit/s.
        """
        newest = list(self._rates.get(node, ()))[-WELL:]
        return len(newest) == WELL and all(
            r.at > since and r.mbit * WELL_TIMES >= usual for r in newest
        )

    def next_pair(self, groups: Mapping[str, Sequence[str]]) -> tuple[str, str, str] | None:
        """Who is measured next: (group, node, partner). The node that was not for the longest time,
        with the member of its group with which it was not for the longest.
        """
        due = [
            (self._last(node), k, group, node)
            for group, members in groups.items()
            if len(members) > 1
            for k, node in enumerate(members)
        ]
        if not due:
            return None
        _, _, group, node = min(due)
        last_measured = {r.partner: r.at for r in self._rates.get(node, ())}

        def order(k: int) -> tuple[float, float, int]:
            other = groups[group][k]
            return (last_measured.get(other, -math.inf), self._last(other), k)

        others = [k for k, other in enumerate(groups[group]) if other != node]
        return group, node, groups[group][min(others, key=order)]

    def _last(self, node: str) -> float:
        rates = self._rates.get(node)
        return rates[-1].at if rates else -math.inf

    def _recent(self, node: str, group: str, now: float) -> list[LinkRate]:
        rates = self._rates.get(node, ())
        return [r for r in rates if r.group == group and now - r.at <= WITHIN_S]


def gap_s(nodes: int, every_s: float) -> float:
    """Time from one measurement to the next with which each of so many nodes takes part in one
    about every ``every_s``.
    """
    return max(LEAST_GAP_S, 2.0 * every_s / max(nodes, 2))
