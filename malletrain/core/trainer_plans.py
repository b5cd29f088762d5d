"""Makes one plan for each trainer. Pure.

Decides which nodes each trainer's plan may use:

* A node that only one trainer's jobs may use belongs to that trainer's plan.
* Nodes that several trainers may use are divided pool by pool, in the proportion of the trainers'
  parts. No trainer gets more than its jobs in that pool could use; the others get the rest.
* A job that must not be moved keeps its nodes, and a guaranteed minimum has room.
* Each plan is then made by itself. Nodes that it leaves unused are offered to the other trainers.

Trainers have objectives in different units, which are never added up.

A job runs on nodes of one pool. If it counted in every pool that it may use, nodes would be
reserved for it that it never gets. So it counts in one pool (:func:`assign_pools`):

1. the pool on whose nodes the job runs;
2. else a pool with room for all that it could use;
3. else, while its trainer has less than its part of all pools together, the pool in which the job
   gains the trainer the most nodes, and then the one in which the other trainers lose the fewest.

A job in a pool with too much demand is then moved to a pool whose nodes would stay idle. The
trainer's plan finally decides where the job runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from itertools import chain

from allocator import NodeInfo
from malletrain.core.planning import Candidate, Plan, Planner
from malletrain.core.settings import PlanningSettings


@dataclass
class TrainerDemand:
    """Demand of the jobs of one trainer for nodes of a pool."""

    part: float
    """Trainers divide shared nodes in proportion to their parts."""
    fixed: int = 0
    """Number of nodes of jobs that must keep their nodes."""
    guaranteed: int = 0
    """Number of nodes for guaranteed minimums, in addition to ``fixed``."""
    most: int = 0
    """Maximum number of nodes that all jobs together could use."""
    nodes: list[str] = field(default_factory=list)
    """Nodes of the pool on which the jobs run, those of fixed jobs first."""

    def add(self, candidate: Candidate, nodes: Sequence[str]) -> None:
        """Add a job that runs on ``nodes`` of the pool."""
        if candidate.fixed:
            self.nodes[self.fixed : self.fixed] = nodes
            self.fixed += len(nodes)
            self.most += len(nodes)
        else:
            self.nodes += nodes
            self.guaranteed += (candidate.smallest or 0) if candidate.must_run else 0
            self.most += candidate.max_nodes

    def remove(self, candidate: Candidate) -> None:
        """Remove a job that :meth:`add` added and that is not fixed."""
        self.most -= candidate.max_nodes
        self.nodes = [node for node in self.nodes if node not in candidate.nodes]
        if candidate.must_run:
            self.guaranteed -= candidate.smallest or 0


def part_of(group: Sequence[Candidate]) -> float:
    """Return the part of the trainer of these jobs; 1 without a trainer."""
    return group[0].trainer.part if group and group[0].trainer else 1.0


def demand_of(
    group: Sequence[Candidate], pool: str, nodes: Mapping[str, NodeInfo]
) -> TrainerDemand:
    """Return the demand of one trainer's jobs for nodes of a pool.

    Args:
        group: the trainer's jobs that count in the pool.
        pool: its name.
        nodes: all nodes of the plan, of any pool.
    """
    demand = TrainerDemand(part_of(group))
    for c in group:
        demand.add(c, [n for n in c.nodes if n in nodes and nodes[n].node_class == pool])
    return demand


def split(demands: Mapping[str, TrainerDemand], nodes: int) -> dict[str, int]:
    """Divide the nodes of a pool.

    Args:
        demands: trainer → its demand.
        nodes: number of nodes in the pool.

    Returns:
        Trainer → number of nodes.
    """
    minimums, room = {}, nodes - sum(demand.fixed for demand in demands.values())
    for name, demand in demands.items():
        guaranteed = min(demand.guaranteed, room)
        minimums[name], room = demand.fixed + guaranteed, room - guaranteed
    level = _level(demands, minimums, nodes)
    counts = {
        name: max(minimums[name], min(demand.most, math.floor(demand.part * level + 1e-9)))
        for name, demand in demands.items()
    }
    remaining = nodes - sum(counts.values())

    def order(name: str) -> tuple[bool, float, str]:
        # A trainer that already has more nodes comes first, so that no node moves back and forth.
        demand = demands[name]
        return counts[name] >= len(demand.nodes), (counts[name] + 1) / demand.part, name

    for name in sorted(demands, key=order):
        if remaining > 0 and counts[name] < demands[name].most:
            counts[name] += 1
            remaining -= 1
    return counts


def _level(demands: Mapping[str, TrainerDemand], minimums: Mapping[str, int], nodes: int) -> float:
    """Return the nodes per unit of part at which the trainers together have ``nodes`` nodes, or all
    that they could use (water-filling between ``minimums`` and ``most``).
    """
    spans = [(minimums[n] / d.part, d.most / d.part, d.part) for n, d in demands.items()]
    below, used = 0.0, float(sum(minimums.values()))
    for end in sorted({end for low, high, _ in spans for end in (low, high)} - {0.0}):
        rising = sum(part for low, high, part in spans if low <= below < high)
        if used + rising * (end - below) >= nodes:
            return below + max(0.0, nodes - used) / rising if rising else below
        used += rising * (end - below)
        below = end
    return below


MAX_MOVES = 64
"""Maximum number of moves in one plan, because each move is chosen among all jobs."""


@dataclass(frozen=True)
class _MovableJob:
    """A job that could count in several pools."""

    trainer: str
    candidate: Candidate
    pools: Sequence[str]


def assign_pools(
    groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
) -> dict[str, str]:
    """Assign a pool to each job.

    Args:
        groups: trainer → its candidates.
        nodes: all nodes of the plan.

    Returns:
        Job → the pool in which it counts. A job that fits into no pool is absent.
    """
    assignment = _Assignment(groups, nodes)
    movable = []
    for trainer, c in _in_order(groups):
        own_nodes = [n for n in c.nodes if n in nodes]
        own_pool = nodes[own_nodes[0]].node_class if own_nodes else None
        pools = assignment.pools_for(c)
        if c.fixed:
            pools = [own_pool] if own_pool else []
        if not pools:
            continue
        if own_pool in pools:
            assignment.put(trainer, c, own_pool, own_nodes)
        else:
            assignment.put(trainer, c, assignment.best_pool(trainer, c, pools))
        if len(pools) > 1:
            movable.append(_MovableJob(trainer, c, pools))
    assignment.use_idle_nodes(movable)
    return assignment.pool_of


def _in_order(groups: Mapping[str, Sequence[Candidate]]) -> Iterator[tuple[str, Candidate]]:
    """Yield (trainer, job): jobs with nodes first. Then, one at a time, a job of the trainer whose
    previous jobs could use the fewest nodes per unit of its part.
    """
    requested, waiting = {}, {}
    for name, group in groups.items():
        running = [c for c in group if c.nodes]
        yield from ((name, c) for c in running)
        requested[name] = sum(c.max_nodes for c in running) / part_of(group)
        waiting[name] = [c for c in reversed(group) if not c.nodes]
    while names := [name for name in groups if waiting[name]]:
        name = min(names, key=requested.__getitem__)
        c = waiting[name].pop()
        requested[name] += c.max_nodes / part_of(groups[name])
        yield name, c


class _Assignment:
    """The current assignment of jobs to pools, and the resulting nodes of each trainer."""

    def __init__(
        self, groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
    ) -> None:
        self.pool_of: dict[str, str] = {}
        self._sizes = Counter(info.node_class for info in nodes.values())
        self._demands = {
            pool: {name: TrainerDemand(part_of(group)) for name, group in groups.items()}
            for pool in self._sizes
        }
        self._splits: dict[str, dict[str, int]] = {}
        self._targets = self._fair_shares(groups)

    def _fair_shares(self, groups: Mapping[str, Sequence[Candidate]]) -> dict[str, int]:
        """Return trainer → its nodes in all pools that it shares, as if jobs were divisible."""
        sharing: dict[frozenset[str], dict[str, TrainerDemand]] = {}
        for name, group in groups.items():
            pools = frozenset(pool for pool in self._sizes for c in group if c.may_use(pool))
            max_nodes = sum(len(c.nodes) if c.fixed else c.max_nodes for c in group)
            sharing.setdefault(pools, {})[name] = TrainerDemand(part_of(group), most=max_nodes)
        shares = {}
        for pools, demands in sharing.items():
            shares.update(split(demands, sum(self._sizes[pool] for pool in pools)))
        return shares

    def pools_for(self, c: Candidate) -> list[str]:
        """Return the pools that are large enough for the smallest size of the job."""
        smallest = c.smallest
        if smallest is None:
            return []
        return [pool for pool, size in self._sizes.items() if smallest <= size and c.may_use(pool)]

    def put(self, trainer: str, c: Candidate, pool: str, nodes: Sequence[str] = ()) -> None:
        """Assign the job to the pool; ``nodes``: nodes of the pool on which it runs."""
        self.pool_of[c.job] = pool
        self._demands[pool][trainer].add(c, nodes)
        self._splits.pop(pool, None)

    def _split(self, pool: str) -> dict[str, int]:
        """Return trainer → number of nodes of the pool, with the jobs assigned so far."""
        if pool not in self._splits:
            self._splits[pool] = split(self._demands[pool], self._sizes[pool])
        return self._splits[pool]

    def _room(self, pool: str) -> int:
        """Return the number of nodes of the pool that its jobs cannot use; negative if they could
        use more.
        """
        return self._sizes[pool] - sum(demand.most for demand in self._demands[pool].values())

    def best_pool(self, trainer: str, c: Candidate, pools: Sequence[str]) -> str:
        """Return the pool for a job without nodes."""
        if len(pools) == 1:
            return pools[0]
        roomiest = max(pools, key=lambda pool: (self._room(pool), pool))
        if self._room(roomiest) >= c.max_nodes:
            return roomiest
        missing = self._targets[trainer] - sum(self._split(pool)[trainer] for pool in self._sizes)

        def merit(pool: str) -> tuple[int, int, str]:
            demands = dict(self._demands[pool])
            demands[trainer] = copy(demands[trainer])
            demands[trainer].add(c, ())
            before, after = self._split(pool), split(demands, self._sizes[pool])
            gain = after[trainer] - before[trainer]
            loss = sum(before[name] - after[name] for name in after if name != trainer)
            return max(0, min(missing, gain)), -loss, pool

        return max(pools, key=merit)

    def use_idle_nodes(self, movable: Sequence[_MovableJob]) -> None:
        """Move jobs while this uses idle nodes. Each job moves at most once; jobs without nodes
        come first. No trainer loses nodes.
        """
        remaining = list(movable)
        while (
            remaining
            and len(movable) - len(remaining) < MAX_MOVES
            and any(self._room(pool) > 0 for pool in self._sizes)
        ):
            moves = [
                (gain, not job.candidate.nodes, number, pool)
                for number, job in enumerate(remaining)
                for pool in job.pools
                if (gain := self._gain(job, pool)) > 0
            ]
            if not moves:
                return
            *_, number, pool = max(moves)
            job = remaining.pop(number)
            before = self.pool_of[job.candidate.job]
            self._demands[before][job.trainer].remove(job.candidate)
            self._splits.pop(before, None)
            self.put(job.trainer, job.candidate, pool)

    def _gain(self, job: _MovableJob, pool: str) -> int:
        """Return the number of additional nodes in use if the job moves to the pool; 0 if it must
        not move.
        """
        before, max_nodes = self.pool_of[job.candidate.job], job.candidate.max_nodes
        excess, room = -self._room(before), self._room(pool)
        if excess <= 0 or room < max(1, job.candidate.smallest or 1):
            return 0
        gain, other_demand = (
            min(room, max_nodes),
            self._demands[before][job.trainer].most - max_nodes,
        )
        if gain < self._split(before)[job.trainer] - other_demand:
            return 0  # its trainer would have fewer nodes
        return gain - max(0, max_nodes - excess)


class TrainerPlanner:
    """Makes a plan for each trainer with ``planner`` and joins them into one."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __call__(
        self,
        candidates: Sequence[Candidate],
        nodes: Mapping[str, NodeInfo],
        settings: PlanningSettings,
        favoured: Collection[str] = (),
        /,
    ) -> Plan:
        """See :func:`malletrain.core.planning.make_plan`. The objective is NaN if there are several
        trainers.
        """
        groups: dict[str, list[Candidate]] = {}
        for c in candidates:
            groups.setdefault(c.trainer.name if c.trainer else "", []).append(c)
        if len(groups) < 2:
            return self._planner(candidates, nodes, settings, favoured)
        division = divide(groups, nodes)
        plans = {
            name: self._planner(group, division[name], settings, favoured)
            for name, group in groups.items()
        }
        solve_s = sum(plan.solve_s for plan in plans.values())
        unused = nodes.keys() - {n for plan in plans.values() for n in _nodes_in_use(plan)}
        for name, group in groups.items():
            usable = _usable(group, plans[name], unused, nodes)
            if usable <= division[name].keys():
                continue
            own_nodes = usable.union(_nodes_in_use(plans[name]))
            plan = self._planner(
                group, {n: info for n, info in nodes.items() if n in own_nodes}, settings, favoured
            )
            solve_s += plan.solve_s
            unused = unused.union(_nodes_in_use(plans[name])).difference(_nodes_in_use(plan))
            plans[name] = plan
        nodes_of = {job: names for plan in plans.values() for job, names in plan.nodes.items()}
        return Plan(
            {c.job: nodes_of[c.job] for c in candidates},
            math.nan,
            max(plan.gap for plan in plans.values()),
            solve_s,
        )


def _nodes_in_use(plan: Plan) -> Iterator[str]:
    return chain.from_iterable(plan.nodes.values())


def _usable(
    group: Sequence[Candidate], plan: Plan, unused: Set[str], nodes: Mapping[str, NodeInfo]
) -> set[str]:
    """Return the unused nodes on which jobs of one trainer could grow."""
    usable: set[str] = set()
    if not unused:
        return usable
    for c in group:
        if not c.fixed and len(plan.nodes[c.job]) < c.max_nodes:
            usable |= {n for n in unused - usable if c.may_use(nodes[n].node_class)}
    return usable


def divide(
    groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
) -> dict[str, dict[str, NodeInfo]]:
    """Divide the nodes among the trainers.

    Args:
        groups: trainer → its candidates.
        nodes: all nodes of the plan.

    Returns:
        Trainer → the nodes that its plan may use.
    """
    pools: dict[str, list[str]] = {}
    for node, info in nodes.items():
        pools.setdefault(info.node_class, []).append(node)
    division: dict[str, dict[str, NodeInfo]] = {name: {} for name in groups}
    pool_of = assign_pools(groups, nodes)
    for pool, names in pools.items():
        demands = {
            name: demand_of([c for c in group if pool_of.get(c.job) == pool], pool, nodes)
            for name, group in groups.items()
        }
        demands = {name: demand for name, demand in demands.items() if demand.most}
        for name, share in _deal(demands, names).items():
            division[name].update((node, nodes[node]) for node in share)
    return division


def _deal(demands: Mapping[str, TrainerDemand], nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return trainer → nodes of one pool. Each trainer keeps as many of its current nodes as its
    share allows.
    """
    if len(demands) < 2:
        return {name: list(nodes) for name in demands}
    counts = split(demands, len(nodes))
    shares = {name: demand.nodes[: counts[name]] for name, demand in demands.items()}
    assigned = {node for share in shares.values() for node in share}
    free = iter(sorted(node for node in nodes if node not in assigned))
    for name, share in shares.items():
        for node in free:
            if len(share) >= counts[name]:
                free = iter([node, *free])
                break
            share.append(node)
    return shares
