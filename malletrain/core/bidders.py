"""Selects the candidates of a plan and the sizes that each admitted job may bid for, and makes the
trials of a sweep bid as one job.

Decides which jobs keep their nodes in any plan, and which jobs a hypothetical plan excludes. The
queue decides who is admitted, the planner how many nodes each job gets.

The trials of a sweep together count as one job. Many trials on one node each process more samples
than one job on as many nodes, so they would outbid another job for nearly every node. A factor
corrects this: the trials' bids together equal the bid of one job with their curve for all their
nodes. The order among the trials does not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from malletrain.core.change_costs import NodeLifetimes
from malletrain.core.gaps import Gaps
from malletrain.core.goal_keeper import GoalKeeper
from malletrain.core.planning import Candidate, guarantees
from malletrain.core.pools import Pool, PoolNode, Trainer, Trainers, pool_sizes
from malletrain.core.profile_runner import ProfileRunner
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.records import JobRecord
from malletrain.core.settings import ControllerSettings
from malletrain.core.shares import Quotas, Shares
from malletrain.core.state import ControllerState

_FACTOR_DECIMALS = 4
"""Number of decimals of a factor."""


def weigh_sweeps(
    candidates: Sequence[Candidate], sweeps: Mapping[str, str], nodes: int, exponent: float
) -> list[Candidate]:
    """Return the candidates, with the trials of each sweep weighted so that together they bid like
    one job.

    Args:
        candidates: candidates of one plan.
        sweeps: job → its sweep. Other jobs stay unchanged.
        nodes: number of nodes of the plan. Trials beyond those that can run do not lower the
            factor.
        exponent: assumed scaling of unmeasured jobs, nodes**exponent.
    """
    groups: dict[str, list[Candidate]] = {}
    for c in candidates:
        if c.job in sweeps:
            groups.setdefault(sweeps[c.job], []).append(c)
    factors = {
        sweep: sweep_factor(group, nodes, exponent)
        for sweep, group in groups.items()
        if len(group) > 1
    }
    if not factors:
        return list(candidates)
    return [
        c.but(weight=c.weight * factors[sweeps[c.job]]) if sweeps.get(c.job) in factors else c
        for c in candidates
    ]


def sweep_factor(trials: Sequence[Candidate], nodes: int, exponent: float) -> float:
    """Return the factor on the weights of a sweep's trials, at most 1: the mean of a ratio over the
    trials. It is a trial's throughput per node on the nodes of all trials together, divided by that
    at its smallest size.
    """
    bids = []
    for c in trials:
        smallest = c.smallest or c.min_nodes
        count = max(1, min(len(trials), nodes // smallest))
        bids.append(_per_node(c, count * smallest, exponent) / _per_node(c, smallest, exponent))
    return round(min(1.0, sum(bids) / len(bids)), _FACTOR_DECIMALS)


def _per_node(c: Candidate, nodes: int, exponent: float) -> float:
    """Return the throughput per node, in any unit. Beyond the largest size it is extrapolated as
    nodes**exponent.
    """
    if c.curve is None:
        return float(nodes ** (exponent - 1.0))
    max_nodes = max(c.max_nodes, 1)
    usable = min(nodes, max_nodes)
    rate = max(c.curve.at(usable), 1e-300) / usable
    return float(rate * (nodes / usable) ** (exponent - 1.0))


class Bidders:
    """The candidates of one controller's plans."""

    def __init__(
        self,
        state: ControllerState,
        gaps: Gaps,
        queue: AdmissionQueue,
        profiles: ProfileRunner,
        goals: GoalKeeper,
        shares: Shares,
        quotas: Quotas,
        trainers: Trainers,
        settings: ControllerSettings,
    ) -> None:
        self._state = state
        self._gaps = gaps
        self._queue = queue
        self._profiles = profiles
        self._goals = goals
        self._shares = shares
        self._quotas = quotas
        self._trainers = trainers
        self._min_interval_s = settings.min_interval_s
        self._prior_exponent = settings.planning.prior_exponent

    def for_current_nodes(self, now: float) -> list[Candidate]:
        """Return the candidates for the current nodes. Each job bids for its owner's nodes."""
        state = self._state
        free = +state.usable_by_pool
        candidates: dict[str, Candidate] = {}
        for job in self._queue.admitted(free, shared=False):
            fixed = self.stays(job, now)
            candidates[job.submitted.job] = _candidate(job, self._trainer(job), fixed=fixed)
            if fixed:
                free -= Counter(state.usable[n].pool for n in job.nodes)
        holders = [
            c for name, c in candidates.items() if state.jobs[name].guaranteed_until and not c.fixed
        ]
        return self._with_bids(candidates, holders, free, state.usable, now)

    def for_hypothetical_nodes(self, nodes: Mapping[str, PoolNode], now: float) -> list[Candidate]:
        """Return the candidates for a hypothetical plan, which shows how many nodes each job could
        use. Any owner can get any node, and no job is fixed.

        Guarantees are ignored, because otherwise no nodes would be leased for the next job in the
        queue. A job bids for at most its own nodes and those that its owner can lease. While leases
        of the owner fail (it is backing off), it can lease none.
        """
        free = pool_sizes(nodes)
        candidates: dict[str, Candidate] = {}
        obtainable_nodes: dict[str, int | None] = {}
        for job in self._queue.admitted(free, shared=True):
            spec, current_nodes = job.submitted, len(job.nodes)
            if spec.owner not in obtainable_nodes:
                obtainable_nodes[spec.owner] = self._obtainable_nodes(nodes, spec.owner, now)
            obtainable, candidate = (
                obtainable_nodes[spec.owner],
                _candidate(job, self._trainer(job), shared=True),
            )
            if obtainable is None:
                candidates[spec.job] = candidate
            elif current_nodes or obtainable >= spec.min_nodes:
                obtained = max(spec.min_nodes, current_nodes + obtainable)
                max_nodes = min(candidate.max_nodes, obtained)
                candidates[spec.job] = candidate.but(max_nodes=max_nodes)
        return self._with_bids(candidates, [], free, nodes, now)

    def _obtainable_nodes(
        self, nodes: Mapping[str, PoolNode], owner: str, now: float
    ) -> int | None:
        """Return how many of the nodes outside the owner's jobs the owner could lease; None for
        all.
        """
        if self._gaps.backing_off(owner, now):
            return 0
        if not self._gaps.choosy:
            return None
        records, jobs = self._state.nodes, self._state.jobs
        return sum(
            self._gaps.fits(name, owner, now)
            for name in nodes
            if not (
                name in records
                and (job := records[name].job) is not None
                and jobs[job].submitted.owner == owner
            )
        )

    def _with_bids(
        self,
        candidates: dict[str, Candidate],
        holders: list[Candidate],
        free: Mapping[Pool, int],
        nodes: Mapping[str, PoolNode],
        now: float,
    ) -> list[Candidate]:
        lifetimes = NodeLifetimes(nodes)
        # A guarantee is of no use to a job whose nodes would be gone before it is ready.
        starving = [c for c in self._queue.starving(candidates, now) if _is_startable(c, lifetimes)]
        bids = []
        for trainer in self._trainers:
            own = {name: c for name, c in candidates.items() if c.trainer is trainer}
            own_nodes = trainer.own(nodes) if trainer else nodes
            remaining_nodes = self._goals.left_for_turns(
                own.values(), self._trainers.usable(free, trainer), own_nodes
            )
            newcomers = self._unmeasured_jobs(own, own_nodes)
            chosen = guarantees(
                [c for c in holders if c.job in own],
                [*(c for c in starving if c.job in own), *newcomers],
                remaining_nodes,
                own_nodes,
            )
            bidders = [c.but(must_run=True) if name in chosen else c for name, c in own.items()]
            # Goals use the final weights of the jobs.
            weighted = self._shares.weigh(self._merge_sweeps(bidders, len(own_nodes)))
            bids += self._goals.bids(weighted, now, trainer.deadline_weight if trainer else None)
        return self._quotas.within(bids)

    def _unmeasured_jobs(
        self, candidates: Mapping[str, Candidate], nodes: Mapping[str, PoolNode]
    ) -> list[Candidate]:
        """Return the jobs without nodes whose throughput is unknown until they run. They must run
        if their smallest size is at most an even share of the nodes.
        """
        jobs, even_share = self._state.jobs, len(nodes) / max(1, len(candidates))
        return [
            c
            for name, c in candidates.items()
            if not c.nodes and (c.smallest or 0) <= even_share and self._profiles.unseen(jobs[name])
        ]

    def _merge_sweeps(self, bidders: list[Candidate], nodes: int) -> list[Candidate]:
        state = self._state
        if not state.sweeps:
            return bidders
        jobs = ((c.job, state.jobs[c.job].submitted.sweep) for c in bidders)
        sweeps = {name: sweep for name, sweep in jobs if sweep}
        return weigh_sweeps(bidders, sweeps, nodes, self._prior_exponent)

    def _trainer(self, job: JobRecord) -> Trainer | None:
        return self._trainers.of(job.submitted.trainer)

    def stays(self, job: JobRecord, now: float) -> bool:
        """Return whether the job keeps its nodes in any plan: no rescale is forced, and the job is
        being profiled, is rescaling, or was rescaled recently. In the last case it also schedules a
        plan for the end of the minimum interval.
        """
        state = self._state
        if job.broken or not job.accepts(len(job.nodes)) or not state.none_leaves(job.nodes):
            return False
        if self._profiles.holds(job):
            return True
        rest_until = job.rescaled_at + self._min_interval_s
        if not job.rescaling and now < rest_until:
            state.plan_soon(rest_until)
        return job.rescaling or now < rest_until


def _is_startable(c: Candidate, lifetimes: NodeLifetimes) -> bool:
    """Return whether enough nodes outlast a start of the job."""
    if c.start is None:
        return True
    return lifetimes.enough_outlast_start(c.start, c.nodes, c.smallest or c.min_nodes, c.may_use)


def _candidate(
    job: JobRecord, trainer: Trainer | None, *, fixed: bool = False, shared: bool = False
) -> Candidate:
    spec = job.submitted
    return Candidate(
        spec.job,
        spec.min_nodes,
        job.largest_useful,
        job.nodes,
        weight=spec.weight,
        goal=trainer.goal if trainer else spec.goal,
        curve=job.goodput or job.curve,
        sizes=job.sizes,
        cost=job.cost,
        fixed=fixed,
        broken=job.broken,
        owner=None if shared else spec.owner,
        trainer=trainer,
        node_class=spec.node_class,
        start=job.start,
    )
