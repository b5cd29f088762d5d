"""The gaps that the main scheduler offers, and which of them to request. Pure.

Decides which gaps may be requested (long enough, not requested already, not rejected recently), in
which order, for which user if several want them, and that a user whose leases keep failing requests
none for a while. The lease planner decides how many are useful, the poll how many may be requested
at once.

A failure on a node counts for one owner only: a user without an account, or whose jobs start
nowhere, costs the others nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from allocator import Cohort, NodeInfo
from malletrain.core.pools import class_of, owner_of, pool
from malletrain.core.settings import ControllerSettings


def least_horizon_s(settings: ControllerSettings) -> float:
    """Gaps expected to last less are not asked for: they are not worth a lease, or its charge, or
    the site wants no lease as short.
    """
    return max(settings.min_horizon_s, settings.due_s)


class Asked(NamedTuple):
    """What was chosen of the gaps."""

    now: dict[str, tuple[str, ...]]
    """Owner → nodes that are asked for."""
    later: Counter[str]
    """Pool → how many there is no room for before the next poll."""


@dataclass
class Gaps:
    """The latest poll, and what was asked for since; times in seconds (see the controller's
    settings).
    """

    min_horizon_s: float = 0.0
    lease_wait_s: float = 120.0
    rejected_s: float = 300.0
    _seen: dict[str, NodeInfo] = field(default_factory=dict)
    _requests: dict[str, tuple[float, NodeInfo, str]] = field(default_factory=dict)
    _promised: dict[str, tuple[float, NodeInfo, str]] = field(default_factory=dict)
    _rejected_until: dict[tuple[str, str], float] = field(default_factory=dict)
    _refusals: dict[tuple[str, str], int] = field(default_factory=dict)
    _failing: dict[str, tuple[int, float]] = field(default_factory=dict)
    _by_class: Counter[str] | None = None
    _room: float = math.inf

    def seen(
        self,
        gaps: Mapping[str, tuple[float | None, str]],
        now: float,
        room: int | None = None,
    ) -> None:
        """A new poll replaces the one before; leases asked for too long ago are forgotten.
        ``room``: how many may be asked for until the next one.
        """
        self._room = math.inf if room is None else room
        self._seen = {
            name: NodeInfo(node_class, horizon)
            for name, (horizon, node_class) in gaps.items()
            if horizon is None or horizon >= self.min_horizon_s
        }
        self._requests = {
            name: request
            for name, request in self._requests.items()
            if now < request[0] + self.lease_wait_s
        }
        # A node that was reclaimed is the main scheduler's now. As soon as it is a gap it is asked
        # for like any other.
        self._promised = {
            name: p for name, p in self._promised.items() if name not in self._seen and now < p[0]
        }
        self._rejected_until = {
            key: until for key, until in self._rejected_until.items() if now < until
        }
        self._by_class = None

    def foretold(self, nodes: Mapping[str, tuple[float, Cohort]]) -> None:
        """How long nodes are expected to last still. A gap that is too short now is none."""
        for name in nodes.keys() & self._seen.keys():
            horizon_s, cohort = nodes[name]
            if horizon_s < self.min_horizon_s:
                self.over(name)
                continue
            self._seen[name] = self._seen[name].with_forecast(horizon_s, cohort)

    def over(self, node: str) -> None:
        """``node`` is leased, or cannot be: until the next poll it is no gap."""
        before = self._class(node)
        self._seen.pop(node, None)
        self._requests.pop(node, None)
        after = self._class(node)
        if self._by_class is not None and before != after:
            self._by_class[before] -= 1
            self._by_class[after] += 1
            self._by_class = +self._by_class
            self._by_class.pop("", None)

    def _class(self, node: str) -> str:
        """The class of a node that is open or coming; empty: it is neither."""
        for requests in (self._requests, self._promised):
            if node in requests:
                return requests[node][1].node_class
        return self._seen[node].node_class if node in self._seen else ""

    def joined(self, node: str, owner: str) -> None:
        """The lease on ``node`` is up."""
        self.over(node)
        self._refusals.pop((node, owner), None)
        self._failing.pop(owner, None)
        self._promised.pop(node, None)

    def refused(self, node: str, owner: str, now: float) -> None:
        """A lease asked for came to nothing: ask more and more rarely."""
        if node in self._requests and self._requests[node][2] != owner:
            return
        if node in self._requests:
            self._refusals[node, owner] = times = self._refusals.get((node, owner), 0) + 1
            if times > 1:
                self._rejected_until[node, owner] = now + min(
                    self.rejected_s, 2.0 ** min(times, 20)
                )
            rounds, until = self._failing.get(owner, (0, now))
            if owner and now >= until:  # many at once are one failure
                self._failing[owner] = (
                    rounds + 1,
                    now + (min(self.rejected_s, 10.0 * 2.0**rounds) if rounds else 1.0),
                )
        self.over(node)

    def put_off(self, node: str, owner: str) -> None:
        """The lease on ``node`` was not asked for yet. The node is a gap still, and nobody has
        refused anything; more is asked for after the next poll.
        """
        if node in self._requests and self._requests[node][2] == owner:
            del self._requests[node]
            self._room = 0
            self._by_class = None

    def backing_off(self, owner: str, now: float) -> bool:
        """Whether the owner's leases came to nothing again and again, so that nothing is asked for
        as that owner for a while.
        """
        rounds, until = self._failing.get(owner, (0, now))
        return rounds > 1 and now < until

    def backing_off_s(self, now: float) -> float:
        """Seconds until every owner's leases are asked for again."""
        return max((u - now for n, u in self._failing.values() if n > 1 and u > now), default=0.0)

    def rejected(self, node: str, owner: str, now: float) -> None:
        """Leave ``node`` alone for a while."""
        self.over(node)
        self._rejected_until[node, owner] = now + self.rejected_s

    def open(
        self, leased: Collection[str], owners: Collection[str], now: float
    ) -> dict[str, NodeInfo]:
        """The gaps that may be requested now for one of ``owners``; ``leased`` nodes are left
        out.
        """
        gaps = {
            name: info
            for name, info in self._seen.items()
            if name not in leased and name not in self._requests
        }
        if self._rejected_until:
            gaps = {
                name: info
                for name, info in gaps.items()
                if any(self.fits(name, owner, now) for owner in owners)
            }
        return gaps

    @property
    def choosy(self) -> bool:
        """Whether some node is left alone for some owner."""
        return bool(self._rejected_until)

    def fits(self, node: str, owner: str, now: float) -> bool:
        """Whether ``node`` may be asked for as ``owner``."""
        return now >= self._rejected_until.get((node, owner), now)

    def may_have(self, node: str, owner: str, now: float) -> bool:
        """Whether a lease on ``node`` would be asked for as ``owner`` now, were it idle."""
        return self.fits(node, owner, now) and not self.backing_off(owner, now)

    def left_alone(self, owner: str, now: float) -> dict[str, float]:
        """Seconds for which each idle node is not asked for as ``owner``, because a lease or a
        job's processes came to nothing there.
        """
        return {
            node: until - now
            for (node, whose), until in sorted(self._rejected_until.items())
            if whose == owner and node in self._seen and now < until
        }

    def promise(self, node: str, info: NodeInfo, owner: str, until: float) -> None:
        """``node`` is reclaimed for a job of ``owner``: count on it for a while, although another
        holds it still.
        """
        self._promised[node] = (until, info, owner)
        self._by_class = None

    def coming(self, leased: Collection[str]) -> dict[str, tuple[NodeInfo, str]]:
        """The nodes on their way, each with the user it will be of: leases asked for that are not
        up yet (a poll need not show them: the node is being given to us), and nodes reclaimed.
        """
        requested = {
            name: (info, owner)
            for name, (_, info, owner) in self._requests.items()
            if name not in leased
        }
        return {
            **{name: (info, owner) for name, (_, info, owner) in self._promised.items()},
            **requested,
        }

    def comes(self, leased: Collection[str], owner: str | None = None) -> bool:
        """Whether a node is on its way, as :meth:`coming` tells; one of this owner's, if given."""
        reclaimed = any(owner in (None, mine) for _, _, mine in self._promised.values())
        return reclaimed or any(
            owner in (None, mine) and name not in leased
            for name, (_, _, mine) in self._requests.items()
        )

    def by_class(self) -> Counter[str]:
        """How many nodes of each class are open or coming, at most."""
        if self._by_class is None:
            nodes = {
                **self._seen,
                **{
                    name: info
                    for name, (_, info, _) in (*self._promised.items(), *self._requests.items())
                },
            }
            self._by_class = Counter(info.node_class for info in nodes.values())
        return self._by_class

    def ask(self, counts: Mapping[str, int], offers: Mapping[str, NodeInfo], now: float) -> Asked:
        """Choose ``counts`` (pool → how many) of ``offers``, the longest horizons first, and
        remember those that are asked for. Where several owners want nodes of one class, they take
        one each in turn.
        """
        waiting: dict[str, dict[str, int]] = {}
        for name, count in sorted(counts.items()):
            waiting.setdefault(class_of(name), {})[owner_of(name)] = count
        chosen: dict[str, list[str]] = {}
        later: Counter[str] = Counter()
        for name, info in sorted(
            offers.items(),
            key=lambda o: (o[1].horizon_s is not None, -(o[1].horizon_s or 0.0), o[0]),
        ):
            wishes = waiting.get(info.node_class, {})
            owner = next(
                (
                    each
                    for each, count in wishes.items()
                    if count > 0 and self.fits(name, each, now)
                ),
                None,
            )
            if owner is None:
                continue
            wishes[owner] = wishes.pop(owner) - 1  # the others first
            if self._room < 1:
                later[pool(info.node_class, owner)] += 1
                continue
            self._room -= 1
            chosen.setdefault(owner, []).append(name)
            self._requests[name] = (now, info, owner)
        return Asked({owner: tuple(names) for owner, names in chosen.items()}, later)
