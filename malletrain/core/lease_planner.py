"""Decides which leases to take and for which owner, which to release, and which to reclaim for
another owner.

It follows a hypothetical plan that includes every gap and in which every job can get every node.

Between two leases no job has the node: the old lease ends, the main scheduler finds the node idle
and runs a backfill cycle, then the new lease starts. Two rules follow for reclaiming:

* That time is subtracted from the forward-looking time in which a node is useful. A node is not
  taken if nothing remains. The rule does not apply to an owner without nodes, because its first
  node costs that time whenever it comes.
* The curve of an unmeasured job is only an assumption. Such a job first gets only its smallest
  size, and later at most twice the largest size at which it has run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from malletrain.core.bidders import Bidders
from malletrain.core.commands import Command, ReclaimNodes, ReleaseLeases, TakeLeases
from malletrain.core.gaps import Gaps, host_groups
from malletrain.core.planning import Candidate, Plan, Planner
from malletrain.core.pools import Pool, PoolNode, by_class
from malletrain.core.records import NodeRecord
from malletrain.core.settings import ControllerSettings
from malletrain.core.state import ControllerState
from scavenger.interface import host_of

MAX_MEASUREMENTS = 5
"""Number of last measurements whose median is the expected time."""

Imagine = Callable[[Sequence[Candidate]], Plan]
"""Makes a hypothetical plan of these candidates, in which every job can get every node."""


class LeaseWay:
    """Measures the time of a node between the leases of two owners.

    Args:
        expected_s: assumed time until one is measured, seconds.
        longest_s: longer times are ignored, because the node was used otherwise in between,
            seconds.
    """

    def __init__(self, expected_s: float, longest_s: float) -> None:
        self._seen: deque[float] = deque(maxlen=MAX_MEASUREMENTS)
        self._expected_s = expected_s
        self._longest_s = longest_s
        self._began: dict[str, tuple[float, str]] = {}

    @property
    def seconds(self) -> float:
        """Expected time between the leases, seconds."""
        return median(self._seen) if self._seen else self._expected_s

    def begins(self, node: str, owner: str, now: float) -> None:
        """Note that ``node`` is taken from its owner for ``owner``."""
        self._began[node] = (now, owner)

    def joined(self, node: str, owner: str, now: float) -> None:
        """Note that a lease of ``owner`` on ``node`` has started."""
        began, requester = self._began.pop(node, (now, ""))
        if requester and requester == owner and now - began <= self._longest_s:
            self._seen.append(now - began)


def worth_taking(
    lacking: Mapping[Pool, int],
    candidates: Sequence[Candidate],
    owners: Mapping[str, str],
    tried: Callable[[str], int | None],
    way_s: float,
    imagine: Imagine,
    everything: Mapping[str, PoolNode],
    pool_sizes: Mapping[Pool, int],
) -> Counter[Pool]:
    """Return how many of the nodes that each pool lacks are worth taking from other owners.

    Args:
        lacking: pool → number of additional nodes in the best plan.
        candidates: candidates of that plan.
        owners: job → its owner.
        tried: returns the largest measured size of a job (0 for none); None if no measurement is
            required.
        way_s: time of a node between two leases, seconds.
        imagine: makes a hypothetical plan.
        everything: nodes of that plan.
        pool_sizes: pool → number of nodes that it has or that are on their way to it.

    Returns:
        Pool → number of nodes.
    """
    needy = {pool.owner for pool, count in lacking.items() if count > 0}
    if not needy:
        return Counter()
    careful = [_carefully(c, tried(c.job)) if owners[c.job] in needy else c for c in candidates]
    has_nodes = {pool.owner for pool, count in pool_sizes.items() if count > 0}
    growing = needy & has_nodes
    late = [c.but(late_s=way_s) if owners[c.job] in growing else c for c in careful]
    pays = _lacking(imagine(late), everything, owners, pool_sizes)
    if careful == list(candidates):
        shortage = Counter(lacking)
    else:
        shortage = _lacking(imagine(careful), everything, owners, pool_sizes)
    return Counter(
        {
            pool: min(lacking[pool], shortage[pool])
            for pool in lacking
            if min(pays[pool], shortage[pool])
        }
    )


def _carefully(candidate: Candidate, tried: int | None) -> Candidate:
    """Return the job, limited to the sizes that it can have before larger ones are measured."""
    if tried is None:
        return candidate
    smallest = candidate.smallest or candidate.min_nodes
    max_size = max(smallest, 2 * tried, len(candidate.nodes))
    return candidate.but(max_nodes=min(candidate.max_nodes, max_size))


def _within(shortage: Counter[Pool], room: Mapping[str, int]) -> Counter[Pool]:
    """Return ``shortage`` (pool → nodes), limited to the leases that each owner may still have."""
    remaining: dict[str, int] = {}
    allowed: Counter[Pool] = Counter()
    for pool, count in sorted(shortage.items(), key=lambda item: item[0].order):
        limit = remaining.setdefault(pool.owner, room[pool.owner])
        allowed[pool] = min(count, max(0, limit))
        remaining[pool.owner] = limit - allowed[pool]
    return +allowed


def _lacking(
    plan: Plan,
    everything: Mapping[str, PoolNode],
    owners: Mapping[str, str],
    pool_sizes: Mapping[Pool, int],
) -> Counter[Pool]:
    """Return pool → number of nodes that the plan adds to those in ``pool_sizes``."""
    used: Counter[Pool] = Counter()
    for job, nodes in plan.nodes.items():
        if nodes:  # all of one class
            used[Pool(everything[nodes[0]].pool.node_class, owners[job])] += len(nodes)
    return used - Counter(pool_sizes)


PLAN_PAUSE_S_PER_JOB = 0.001
"""Minimum time between two hypothetical plans, seconds per unfinished job. Without it, with
thousands of jobs, every start of one would cause another plan for all of them.
"""


class LeasePlanner:
    """Leases of one controller's nodes."""

    def __init__(
        self,
        state: ControllerState,
        gaps: Gaps,
        bidders: Bidders,
        planner: Planner,
        settings: ControllerSettings,
    ) -> None:
        self._state = state
        self._gaps = gaps
        self._bidders = bidders
        self._planner = planner
        self._settings = settings
        self._reclaim_at = -math.inf
        self.again_at = -math.inf
        """Time of the next review at the earliest."""
        self._longest_way_s = settings.reclaim_s + settings.lease_wait_s
        self._way = LeaseWay(settings.reclaim_way_s, self._longest_way_s)

    def joined(self, node: str, owner: str, now: float) -> None:
        """Note that a lease of ``owner`` on ``node`` has started."""
        self._way.joined(node, owner, now)

    def review(self, now: float) -> list[Command]:
        """Release unneeded nodes, request as many gaps as the hypothetical plan uses, and reclaim
        nodes that other owners need.
        """
        state, gaps = self._state, self._gaps
        due: list[str] = []
        if state.plan_at is None:
            due = sorted(n for n in state.idle if now >= state.nodes[n].review_at)
        if not due and not state.leases_due:
            return []
        if now < self.again_at:
            return []
        state.leases_due = False
        offers = gaps.open(state.nodes, state.owners, now)
        may_reclaim = len(state.owners) > 1 and now >= self._reclaim_at
        if not due and not offers and not may_reclaim:
            return []
        coming = gaps.coming(state.nodes)
        # If only the daemon's own user has jobs and leases, pools have no owner already.
        usable = (
            state.usable
            if state.owners.keys() <= {""}
            else {name: state.nodes[name].ownerless_info for name in state.usable}
        )
        everything = {**usable, **{name: info for name, (info, _) in coming.items()}, **offers}
        imagined = self._imagine(everything, coming, now)
        self.again_at = now + PLAN_PAUSE_S_PER_JOB * len(state.unfinished)
        used: Counter[Pool] = Counter()
        for job, nodes in imagined.nodes.items():
            if nodes:  # all of one class
                node_class = everything[nodes[0]].pool.node_class
                used[Pool(node_class, state.jobs[job].submitted.owner)] += len(nodes)
        leased = state.usable_by_pool
        spare = leased - used
        shortage = (
            used - leased - Counter(Pool(i.pool.node_class, owner) for i, owner in coming.values())
        )
        commands: list[Command] = []
        if released := self._release(due, spare, now):
            commands.append(ReleaseLeases(released))
        room = self._room(Counter(owner for _, owner in coming.values()))
        if room is not None:
            shortage = _within(shortage, room)
        requests = gaps.ask(shortage, offers, now, room)
        shortage -= requests.later
        for owner, names in requests.now.items():
            commands.append(TakeLeases(names, owner))
            shortage -= Counter(Pool(offers[name].pool.node_class, owner) for name in names)
        if may_reclaim and +shortage:
            shortage = self._worth_taking(shortage, everything, now)
            commands += self._reclaim(shortage, spare, imagined, now, room)
        return commands

    def _room(self, coming: Counter[str]) -> dict[str, int] | None:
        """Return owner → number of leases that the owner may still have; None if there is no limit.
        ``coming``: owner → nodes on their way.
        """
        max_leases = self._settings.max_leases_per_owner
        if not max_leases:
            return None
        room: dict[str, int] = defaultdict(lambda: max_leases)
        for owner, count in coming.items():
            room[owner] -= count
        for node in self._state.nodes.values():
            room[node.owner] -= 1
        return room

    def _must_keep(self, node: NodeRecord, now: float) -> bool:
        """Return whether to keep the node's lease, because it has not lasted its minimum time and
        its owner has work.
        """
        if now >= node.due_until:
            return False
        return node.job is not None or any(
            job.submitted.owner == node.owner and len(job.nodes) < job.submitted.max_nodes
            for job in self._state.unfinished.values()
        )

    def _imagine(
        self,
        everything: Mapping[str, PoolNode],
        coming: Mapping[str, tuple[PoolNode, str]],
        now: float,
    ) -> Plan:
        leased = map(Pool, by_class(self._state.usable_by_pool))
        favoured = {*leased, *(info.pool for info, _ in coming.values())}
        candidates = self._bidders.for_hypothetical_nodes(everything, now)
        return self._planner(candidates, everything, self._settings.planning, favoured)

    def _worth_taking(
        self, lacking: Counter[Pool], everything: Mapping[str, PoolNode], now: float
    ) -> Counter[Pool]:
        """Return how many of the nodes ``lacking`` (pool → number) are worth taking from other
        owners.
        """
        state, coming = self._state, self._gaps.coming(self._state.nodes)
        pool_sizes = state.usable_by_pool + Counter(
            Pool(info.pool.node_class, owner) for info, owner in coming.values()
        )
        candidates = self._bidders.for_hypothetical_nodes(everything, now)
        return worth_taking(
            lacking,
            candidates,
            {c.job: state.jobs[c.job].submitted.owner for c in candidates},
            self._largest_measured,
            self._way.seconds,
            lambda changed: self._planner(changed, everything, self._settings.planning),
            everything,
            pool_sizes,
        )

    def _largest_measured(self, job: str) -> int | None:
        """Return the largest measured size of the job (0 for none); None if its curve comes from a
        profile, a sibling or its owner, or will never be measured.
        """
        record = self._state.jobs[job]
        scaling = record.scaling
        profile_due = self._settings.profiling is not None and record.submitted.profile
        if not profile_due or scaling.profiled or scaling.curve.current.prior is not None:
            return None
        if record.curve is not None and not scaling.has_data:
            return None  # stated by its owner
        return max(scaling.curve.measured_sizes, default=0)

    def _release(self, due: list[str], spare: Counter[Pool], now: float) -> tuple[str, ...]:
        """Remove those of the ``due`` nodes that are ``spare`` (pool → number), and return them."""
        state = self._state
        released: list[str] = []
        groups, incomplete = self._host_groups()
        for name in due:
            if name not in state.nodes:  # released with another slot of its host
                continue
            node, names = state.nodes[name], groups.get(name, (name,))
            next_review = now + max(1.0, self._settings.release_after_s)
            # Those of a host are given back all together or not at all.
            is_complete = name not in groups or host_of(name) not in incomplete
            if spare[node.pool] < len(names) or not is_complete or not state.idle.issuperset(names):
                state.keep_idle(name, next_review)
            elif (review_at := max(state.nodes[n].review_at for n in names)) > now:
                state.keep_idle(name, review_at)
            elif any(self._must_keep(state.nodes[n], now) for n in names):
                due_until = max(state.nodes[n].due_until for n in names)
                state.keep_idle(name, min(next_review, due_until))
            else:
                spare[node.pool] -= len(names)
                released += names
                for each in names:
                    state.node_gone(each)
        return tuple(released)

    def _host_groups(self) -> tuple[dict[str, tuple[str, ...]], set[str]]:
        """Return slot → the slots with which it is given back, and the hosts of which slots are
        still on their way.
        """
        if not (classes := self._settings.whole_host_classes):
            return {}, set()
        leased = {name: node.info for name, node in self._state.nodes.items()}
        incomplete = {host_of(name) for name in self._gaps.coming(self._state.nodes)}
        return host_groups(leased, classes), incomplete

    def _reclaim(
        self,
        lacking: Counter[Pool],
        spare: Counter[Pool],
        imagined: Plan,
        now: float,
        room: dict[str, int] | None,
    ) -> list[Command]:
        """Take nodes from owners whose jobs have less use for them.

        A reclaimed node goes back to the main scheduler. Its next owner requests a lease like any
        other.

        Args:
            lacking: pool → number of nodes that it lacks.
            spare: pool → number of nodes that it can spare.
            imagined: the hypothetical plan.
            now: time on the shell's clock.
            room: owner → number of leases that the owner may still have; None: no limit.
        """
        state, settings = self._state, self._settings
        reclaimed: list[str] = []
        groups, incomplete = self._host_groups()
        for name in sorted(state.usable, key=lambda n: (state.nodes[n].job is not None, n)):
            node, names = state.nodes[name], groups.get(name, (name,))
            if name in groups and host_of(name) in incomplete:
                continue
            needy = next(
                (
                    p
                    for p in lacking
                    if lacking[p] > 0
                    and p.node_class == node.pool.node_class
                    and (room is None or len(names) <= room[p.owner])
                    and all(self._gaps.may_have(n, p.owner, now) for n in names)
                ),
                None,
            )
            if needy is None or spare[node.pool] < len(names) or name in reclaimed:
                continue
            if not all(self._is_reclaimable(n, imagined, now) for n in names):
                continue
            lacking[needy] -= len(names)
            spare[node.pool] -= len(names)
            if room is not None:
                room[needy.owner] -= len(names)
            reclaimed += names
            until = now + self._longest_way_s
            for each in names:
                self._gaps.promise(each, state.nodes[each].ownerless_info, needy.owner, until)
                self._way.begins(each, needy.owner, now)
        if not reclaimed:
            return []
        for name in reclaimed:
            if state.node_leaving(name, now + settings.reclaim_s):
                state.plan_soon(now + settings.notice_wait(settings.reclaim_s))
        self._reclaim_at = now + settings.reclaim_every_s
        return [ReclaimNodes(tuple(reclaimed), settings.reclaim_s)]

    def _is_reclaimable(self, name: str, imagined: Plan, now: float) -> bool:
        """Return whether the node may be taken from its owner: its lease need not last longer, and
        its job does not keep it in the hypothetical plan or by a guarantee.
        """
        node = self._state.nodes[name]
        if self._must_keep(node, now):
            return False
        job = self._state.jobs.get(node.job or "")
        return job is None or not (
            job.guaranteed_until > now
            or self._bidders.stays(job, now)
            or name in imagined.nodes.get(job.submitted.job, ())
        )
