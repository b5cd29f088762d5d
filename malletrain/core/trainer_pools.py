"""Decides in which pool each job counts when trainers share several pools. Pure.

A job runs on nodes of one pool. If it counted in every pool that it may use, nodes would be
reserved for it that it never gets. So it counts in one pool:

1. the pool on whose nodes the job runs;
2. else a pool with room for all that it could use;
3. else, while its trainer has less than its part of all pools together, the pool in which the job
   gains the trainer the most nodes, and then the one in which the other trainers lose the fewest.

A job in a pool with too much demand is then moved to a pool whose nodes would stay idle. The
trainer's plan finally decides where the job runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from allocator import NodeInfo
from malletrain.core.planning import Candidate
from malletrain.core.trainer_split import TrainerDemand, part_of, split

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
