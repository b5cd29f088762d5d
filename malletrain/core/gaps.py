"""Decides which gaps of the main scheduler to request. Pure.

A gap may be requested if it is long enough, not requested already and not rejected recently.
Decides the order, the user if several want a gap, and that a user whose leases keep failing
requests none for a while. The lease planner decides how many are useful, the poll how many may be
requested at once.

A failure on a node counts for one owner only: a user without an account, or whose jobs start
nowhere, costs the others nothing.

:class:`FailedStarts` counts the leases from which no agent reports, because the agent ended before
or cannot reach the daemon, and decides for how long the leases of a user are not requested then. If
no agent can start anywhere, because the nodes' Python cannot import MalleTrain or a directory is
not mounted there, every idle node would be leased and released again and again, and each time the
main scheduler would have to wait for it. Requests for the leases of a user are paused when more
than :data:`FREE_FAILED_STARTS` starts in a row failed, on at least :data:`MIN_FAILED_NODES` nodes.
The reasons of the failures need not be equal, because they may name nodes, processes and addresses.
A single node on which agents do not start says nothing about the others, and requests are paused
for that node alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from allocator import NodeInfo
from malletrain.core.pools import Pool, PoolNode
from malletrain.core.settings import ControllerSettings
from scavenger.backoff import Backoff, doubled_s
from scavenger.hostlist import named
from scavenger.interface import host_of, kind_of

FIRST_OWNER_PAUSE_S, TOGETHER_S = 20.0, 1.0
"""Length of an owner's first pause after failures in a row, seconds, which each further failure
doubles; and the time after a failure in which further ones do not count, seconds: their leases were
requested together with the first.
"""
FREE_FAILED_STARTS = 2
"""Number of failed starts in a row that cause no pause."""
MIN_FAILED_NODES = 2
"""Minimum number of different nodes on which starts failed before leases are paused."""
MAX_FAILURE_AGE_S = 3600.0
"""Time after which a failed start is no longer reported, seconds."""


@dataclass(frozen=True)
class FailedStart:
    """The newest failed start on one node."""

    node: str
    """Name of the node."""
    reason: str
    """Why no agent reported, as words without a full stop."""
    at: float
    """Time of the failure, seconds on the shell's clock."""


@dataclass
class _OwnersStarts:
    """Failed starts of one owner's leases."""

    backoff: Backoff
    in_a_row: int = 0
    """Number of failed leases since the last one whose agent reported."""
    by_node: dict[str, FailedStart] = field(default_factory=dict)
    """Node → newest failure, if no agent has reported from there since."""
    nodes: set[str] = field(default_factory=set)
    """Nodes, or hosts of slots, on which starts failed since the last one that succeeded
    anywhere.
    """


class FailedStarts:
    """Failed starts of all owners of one machine.

    Args:
        max_pause_s: maximum time without requests, seconds.
    """

    def __init__(self, max_pause_s: float) -> None:
        self._max_pause_s = max_pause_s
        self._owners: dict[str, _OwnersStarts] = {}

    def failed(self, owner: str, node: str, reason: str, now: float) -> None:
        """Note that no agent reported from a lease.

        Args:
            owner: user as whom the lease ran; empty for the daemon's user.
            node: its node.
            reason: why, as words without a full stop.
            now: time, seconds.
        """
        starts = self._owners.get(owner)
        if starts is None:
            backoff = Backoff(
                FIRST_OWNER_PAUSE_S, self._max_pause_s, FREE_FAILED_STARTS, TOGETHER_S
            )
            starts = self._owners[owner] = _OwnersStarts(backoff)
        # Slots of one host fail together: the first one says what the others do.
        is_known = bool(kind_of(node)) and host_of(node) in starts.nodes
        starts.in_a_row += 1
        starts.nodes.add(host_of(node))
        starts.by_node.pop(node, None)  # the newest comes last
        starts.by_node[node] = FailedStart(node, reason, now)
        if not is_known:
            starts.backoff.refused(now, reason)

    def started(self, owner: str, node: str) -> None:
        """Note that the agent of a lease of ``owner`` on ``node`` has reported."""
        if (starts := self._owners.get(owner)) is None:
            return
        starts.by_node.pop(node, None)
        starts.in_a_row = 0
        starts.nodes.clear()
        starts.backoff = Backoff(
            FIRST_OWNER_PAUSE_S, self._max_pause_s, FREE_FAILED_STARTS, TOGETHER_S
        )
        if not starts.by_node:
            del self._owners[owner]

    def pause_s(self, owner: str, now: float) -> float:
        """Return the seconds for which no lease of ``owner`` is requested; 0 for no pause."""
        starts = self._owners.get(owner)
        if starts is None or len(starts.nodes) < MIN_FAILED_NODES:
            return 0.0
        return starts.backoff.remaining_s(now)

    @property
    def owners(self) -> Collection[str]:
        """The users whose leases failed to start."""
        return self._owners.keys()

    def in_a_row(self, owner: str, now: float) -> int:
        """Return the number of ``owner``'s leases that failed since the last agent reported; 0 if
        the newest failure is older than MAX_FAILURE_AGE_S.
        """
        return self._owners[owner].in_a_row if self.recent(owner, now) else 0

    def last(self, owner: str, now: float) -> FailedStart | None:
        """Return the newest failed start of ``owner``; None if there is none within
        MAX_FAILURE_AGE_S.
        """
        recent = self.recent(owner, now)
        return recent[-1] if recent else None

    def recent(self, owner: str, now: float) -> tuple[FailedStart, ...]:
        """Return the failed starts of ``owner`` on nodes from which no agent has reported since,
        the newest last; without those older than MAX_FAILURE_AGE_S.
        """
        starts = self._owners.get(owner)
        return tuple(
            failure
            for failure in (starts.by_node.values() if starts else ())
            if now < failure.at + MAX_FAILURE_AGE_S
        )

    def sentence(self, owner: str, now: float) -> str:
        """Return which leases of ``owner`` failed to start and why, as sentences; empty if none
        did.
        """
        recent = self.recent(owner, now)
        if not recent:
            return ""
        whose = f" as {owner}" if owner else ""
        names = sorted(failure.node for failure in recent)
        where = names[0] if len(names) == 1 else f"{len(names)} nodes ({named(names)})"
        last = recent[-1]
        on = "" if len(names) == 1 else f" on {last.node}"
        text = (
            f"Leases{whose} start on {where}, and no agent reports from them. "
            f"The last one{on}: {last.reason}."
        )
        if pause_s := self.pause_s(owner, now):
            text += f" {self.in_a_row(owner, now)} failed in a row; the next is requested in "
            text += f"{pause_s:.0f} s."
        return text


FIRST_NODE_PAUSE_S = 4.0
"""Time for which a node is not requested after its second failure in a row, seconds. It doubles
with each further failure.
"""


def least_horizon_s(settings: ControllerSettings) -> float:
    """Return the minimum horizon of a gap that is requested, seconds. Shorter gaps are not worth a
    lease or its minimum charge, or the site wants longer leases.
    """
    return max(settings.min_horizon_s, settings.due_s)


def host_groups(
    nodes: Mapping[str, PoolNode], whole_host_classes: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return slot → the slots of its host and pool, itself among them, for the slots that are
    leased and given back together.

    Args:
        nodes: nodes and slots.
        whole_host_classes: classes of slots of which a job has all those of a host.
    """
    if not whole_host_classes:
        return {}
    groups: dict[tuple[str, Pool], list[str]] = {}
    for name, info in nodes.items():
        if info.pool.node_class in whole_host_classes:
            groups.setdefault((host_of(name), info.pool), []).append(name)
    return {name: tuple(sorted(group)) for group in groups.values() for name in group}


class Asked(NamedTuple):
    """The chosen gaps."""

    now: dict[str, tuple[str, ...]]
    """Owner → nodes to request."""
    later: Counter[Pool]
    """Pool → number of nodes that cannot be requested before the next poll."""


@dataclass
class Gaps:
    """The latest poll and the requests since then. Times in seconds (see the controller's
    settings).
    """

    min_horizon_s: float = 0.0
    """Minimum horizon of a gap that is requested."""
    lease_wait_s: float = 120.0
    """Time after which a request without a lease is forgotten."""
    rejected_s: float = 300.0
    """Time for which a rejected node is not requested."""
    whole_host_classes: frozenset[str] = frozenset()
    """Classes of slots that are requested for all of a host together."""
    failed_starts: FailedStarts = field(init=False)
    """Leases from which no agent reported."""
    _seen: dict[str, PoolNode] = field(default_factory=dict)
    """Gap → information. Like all nodes here, it is in a pool with the empty owner."""
    _requests: dict[str, tuple[float, PoolNode, str]] = field(default_factory=dict)
    """Requested node → (time of the request, information, owner)."""
    _promised: dict[str, tuple[float, PoolNode, str]] = field(default_factory=dict)
    """Reclaimed node → (time until which it is expected, information, future owner)."""
    _rejected_until: dict[tuple[str, str], float] = field(default_factory=dict)
    """(node, owner) → time until which it is not requested."""
    _refusals: dict[tuple[str, str], int] = field(default_factory=dict)
    """(node, owner) → number of requests in a row that were not granted."""
    _failing: dict[str, Backoff] = field(default_factory=dict)
    """Owner → pause after failures in a row, in which nothing is requested."""
    _by_class: Counter[str] | None = None
    _max_new_leases: float = math.inf
    """Number of leases that may still be requested until the next poll."""

    def __post_init__(self) -> None:
        self.failed_starts = FailedStarts(self.rejected_s)

    def seen(
        self,
        gaps: Mapping[str, tuple[float | None, str]],
        now: float,
        max_new_leases: int | None = None,
    ) -> None:
        """Store a new poll, and forget requests that are older than ``lease_wait_s``.
        ``max_new_leases``: maximum number of requests until the next poll; None for no limit.
        """
        self._max_new_leases = math.inf if max_new_leases is None else max_new_leases
        classes = {node_class for _, node_class in gaps.values()}
        pool_of = {node_class: Pool(node_class) for node_class in classes}
        self._seen = {
            name: NodeInfo(pool_of[node_class], horizon)
            for name, (horizon, node_class) in gaps.items()
            if horizon is None or horizon >= self.min_horizon_s
        }
        self._requests = {
            name: request
            for name, request in self._requests.items()
            if now < request[0] + self.lease_wait_s
        }
        # A reclaimed node belongs to the main scheduler. It is requested when it is a gap again.
        self._promised = {
            name: p for name, p in self._promised.items() if name not in self._seen and now < p[0]
        }
        self._rejected_until = {
            key: until for key, until in self._rejected_until.items() if now < until
        }
        self._by_class = None

    def over(self, node: str) -> None:
        """Drop ``node`` as a gap until the next poll, because it is leased or cannot be."""
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
        """Return the class of a node that is a gap or on its way; empty if it is neither."""
        for requests in (self._requests, self._promised):
            if node in requests:
                return requests[node][1].pool.node_class
        return self._seen[node].pool.node_class if node in self._seen else ""

    def joined(self, node: str, owner: str) -> None:
        """Note that the lease on ``node`` has started."""
        self.over(node)
        self._refusals.pop((node, owner), None)
        self._failing.pop(owner, None)
        self.failed_starts.started(owner, node)
        self._promised.pop(node, None)

    def refused(self, node: str, owner: str, now: float, failure: str = "") -> None:
        """Note that a requested lease was not granted, or that its agent ended before it reported.
        The time until the next request grows.

        Args:
            node: node of the lease.
            owner: user as whom it was requested.
            now: time, seconds.
            failure: why the agent ended, as words; empty if the lease was not granted.
        """
        if node in self._requests and self._requests[node][2] != owner:
            return
        if failure:  # also long after the request
            self.failed_starts.failed(owner, node, failure, now)
        if node in self._requests:
            self._refusals[node, owner] = refusals = self._refusals.get((node, owner), 0) + 1
            if refusals > 1:
                pause_s = doubled_s(FIRST_NODE_PAUSE_S, refusals - 2, self.rejected_s)
                self._rejected_until[node, owner] = now + pause_s
            if owner:
                failures = self._failing.setdefault(
                    owner, Backoff(FIRST_OWNER_PAUSE_S, self.rejected_s, 1, TOGETHER_S)
                )
                failures.refused(now)
        self.over(node)

    def put_off(self, node: str, owner: str) -> None:
        """Withdraw a request that was not sent. The node is still a gap. Further requests wait for
        the next poll.
        """
        if node in self._requests and self._requests[node][2] == owner:
            del self._requests[node]
            self._max_new_leases = 0
            self._by_class = None

    def backing_off(self, owner: str, now: float) -> bool:
        """Return whether no leases are requested for the owner for a while, because they failed
        repeatedly.
        """
        failures = self._failing.get(owner)
        if failures is not None and failures.remaining_s(now) > 0:
            return True
        return self.failed_starts.pause_s(owner, now) > 0

    def backing_off_s(self, now: float) -> float:
        """Return the seconds until leases are requested again for every owner."""
        pauses = [each.remaining_s(now) for each in self._failing.values()]
        pauses += [self.failed_starts.pause_s(owner, now) for owner in self.failed_starts.owners]
        return max(pauses, default=0.0)

    def rejected(self, node: str, owner: str, now: float) -> None:
        """Do not request ``node`` as ``owner`` for ``rejected_s``."""
        self.over(node)
        self._rejected_until[node, owner] = now + self.rejected_s

    def open(
        self, leased: Collection[str], owners: Collection[str], now: float
    ) -> dict[str, PoolNode]:
        """Return the gaps that may be requested now for one of ``owners``, without ``leased``
        nodes.
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
        """Whether any node must not be requested for some owner."""
        return bool(self._rejected_until)

    def fits(self, node: str, owner: str, now: float) -> bool:
        """Return whether ``node`` may be requested as ``owner``."""
        return now >= self._rejected_until.get((node, owner), now)

    def may_have(self, node: str, owner: str, now: float) -> bool:
        """Return whether ``node`` would be requested as ``owner`` now if it were idle."""
        return self.fits(node, owner, now) and not self.backing_off(owner, now)

    def left_alone(self, owner: str, now: float) -> dict[str, float]:
        """Return gap → seconds until it is requested again as ``owner``, for nodes on which a lease
        or a job's processes failed.
        """
        return {
            node: until - now
            for (node, requester), until in sorted(self._rejected_until.items())
            if requester == owner and node in self._seen and now < until
        }

    def promise(self, node: str, info: PoolNode, owner: str, until: float) -> None:
        """Expect ``node``, which is reclaimed for a job of ``owner``, until ``until``."""
        self._promised[node] = (until, info, owner)
        self._by_class = None

    def coming(self, leased: Collection[str]) -> dict[str, tuple[PoolNode, str]]:
        """Return node → (information, future owner) of the nodes on their way: requested leases
        that have not started (polls may omit their nodes), and reclaimed nodes.
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
        """Return whether a node is on its way (see :meth:`coming`), for this owner if one is
        given.
        """
        reclaimed = any(owner in (None, node_owner) for _, _, node_owner in self._promised.values())
        return reclaimed or any(
            owner in (None, node_owner) and name not in leased
            for name, (_, _, node_owner) in self._requests.items()
        )

    def by_class(self) -> Counter[str]:
        """Return class → maximum number of nodes that are gaps or on their way."""
        if self._by_class is None:
            nodes = {
                **self._seen,
                **{
                    name: info
                    for name, (_, info, _) in (*self._promised.items(), *self._requests.items())
                },
            }
            self._by_class = Counter(info.pool.node_class for info in nodes.values())
        return self._by_class

    def ask(
        self,
        counts: Mapping[Pool, int],
        offers: Mapping[str, PoolNode],
        now: float,
        room: dict[str, int] | None = None,
    ) -> Asked:
        """Choose nodes, those with the longest horizons first, and store the requests. Several
        owners of one class take turns. If a class has whole hosts, the other offers of a chosen
        slot's host are chosen too.

        Args:
            counts: pool → number of nodes.
            offers: the gaps that may be requested.
            now: time on the shell's clock.
            room: owner → number of leases that the owner may still have, which is reduced by those
                that are requested; None: no limit. It matters for slots that are requested
                together, of which there may be more than ``counts``.
        """
        waiting: dict[str, dict[str, int]] = {}
        for pool, count in sorted(counts.items(), key=lambda item: item[0].order):
            waiting.setdefault(pool.node_class, {})[pool.owner] = count
        chosen: dict[str, list[str]] = {}
        later: Counter[Pool] = Counter()
        decided: set[str] = set()
        groups = host_groups(offers, self.whole_host_classes)
        for name, info in sorted(
            offers.items(),
            key=lambda o: (o[1].horizon_s is not None, -(o[1].horizon_s or 0.0), o[0]),
        ):
            if name in decided:
                continue
            owner_counts = waiting.get(info.pool.node_class, {})
            together = groups.get(name, (name,))

            def may_have_it(
                owner: str, name: str = name, together: Sequence[str] = together
            ) -> bool:
                if not self.fits(name, owner, now):
                    return False
                size = sum(self.fits(n, owner, now) for n in together)
                return room is None or size <= room[owner]

            owner = next(
                (each for each, count in owner_counts.items() if count > 0 and may_have_it(each)),
                None,
            )
            if owner is None:
                continue
            decided.update(together)
            names = [n for n in together if self.fits(n, owner, now)]
            owner_counts[owner] = owner_counts.pop(owner) - len(names)  # move the owner to the end
            if self._max_new_leases < 1:
                later[Pool(info.pool.node_class, owner)] += len(names)
                continue
            self._max_new_leases -= 1
            if room is not None:
                room[owner] -= len(names)
            chosen.setdefault(owner, []).extend(names)
            self._requests.update({n: (now, offers[n], owner) for n in names})
        return Asked({owner: tuple(names) for owner, names in chosen.items()}, later)
