"""Which gaps to ask for: what the controller remembers of the main scheduler's offers. Pure.

Decides which gaps may be asked for (long enough, not asked for already, not found unfit lately) and which of them come first. How many are
of use is the controller's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from allocator import NodeInfo


@dataclass
class Gaps:
    """The latest poll, and what was asked for since; times in seconds (see the controller's settings)."""

    min_horizon_s: float = 0.0
    lease_wait_s: float = 120.0
    unfit_s: float = 300.0
    _seen: dict[str, NodeInfo] = field(default_factory=dict)
    _asked: dict[str, tuple[float, NodeInfo]] = field(default_factory=dict)
    _unfit_until: dict[str, float] = field(default_factory=dict)
    _refusals: dict[str, int] = field(default_factory=dict)
    _by_class: Counter[str] | None = None

    def seen(self, gaps: Mapping[str, tuple[float | None, str]], now: float) -> None:
        """A new poll replaces the one before; leases asked for too long ago are forgotten."""
        self._seen = {
            name: NodeInfo(node_class, horizon)
            for name, (horizon, node_class) in gaps.items()
            if horizon is None or horizon >= self.min_horizon_s
        }
        self._asked = {name: asked for name, asked in self._asked.items() if now < asked[0] + self.lease_wait_s}
        self._unfit_until = {name: until for name, until in self._unfit_until.items() if now < until}
        self._by_class = None

    def over(self, node: str) -> None:
        """``node`` is leased, or cannot be: until the next poll it is no gap."""
        self._seen.pop(node, None)
        self._asked.pop(node, None)
        self._by_class = None

    def joined(self, node: str) -> None:
        """The lease on ``node`` is up."""
        self.over(node)
        self._refusals.pop(node, None)

    def refused(self, node: str, now: float) -> None:
        """A lease asked for came to nothing: ask more and more rarely."""
        if node in self._asked:
            self._refusals[node] = times = self._refusals.get(node, 0) + 1
            if times > 1:
                self._unfit_until[node] = now + min(self.unfit_s, 2.0 ** min(times, 20))
        self.over(node)

    def unfit(self, node: str, now: float) -> None:
        """Leave ``node`` alone for a while."""
        self.over(node)
        self._unfit_until[node] = now + self.unfit_s

    def open(self, held: Collection[str], now: float) -> dict[str, NodeInfo]:
        """The gaps that may be asked for now; ``held`` are leased already."""
        return {
            name: info
            for name, info in self._seen.items()
            if name not in held and name not in self._asked and now >= self._unfit_until.get(name, now)
        }

    def coming(self, held: Collection[str]) -> dict[str, NodeInfo]:
        """The leases asked for that are not up yet. A poll need not show them: the node is being given to us."""
        return {name: info for name, (_, info) in self._asked.items() if name not in held}

    def by_class(self) -> Counter[str]:
        """How many nodes of each class are open or coming, at most."""
        if self._by_class is None:
            nodes = {**self._seen, **{name: info for name, (_, info) in self._asked.items()}}
            self._by_class = Counter(info.node_class for info in nodes.values())
        return self._by_class

    def ask(self, wanted: Mapping[str, int], offers: Mapping[str, NodeInfo], now: float) -> tuple[str, ...]:
        """Choose ``wanted`` (class → how many) of ``offers``, the longest horizons first, and remember that they were asked for."""
        left = dict(wanted)
        chosen = []
        for name, info in sorted(offers.items(), key=lambda o: (o[1].horizon_s is not None, -(o[1].horizon_s or 0.0), o[0])):
            if left.get(info.node_class, 0) > 0:
                left[info.node_class] -= 1
                chosen.append(name)
                self._asked[name] = (now, info)
        return tuple(chosen)
