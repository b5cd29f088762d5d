"""Makes a plan from candidates: builds bids, calls the allocator, and chooses the nodes. Pure.

Decides which jobs' minimums can be guaranteed, and the assumed curve of an unmeasured job. The
queue decides which jobs may bid and in which order they wait. The allocator decides how many nodes
each gets and which ones.

:func:`freetrain_plan` is FreeTrain's planning (arXiv 2106.12091, there called BFTrainer), an
alternative. Owners state how their jobs scale; nothing is measured during training. A plan
maximises the same objective with the same exact solver. Bids differ in three ways: a start from no
nodes is free, a job that lost a node is valued as if its workers did not have to restart, and
waiting guarantees no job its minimum. Used by the daemon (``[allocation] policy``) and by the
simulator. A job without a stated curve is assumed to scale as the site's configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import Any, Protocol

from allocator import (
    Allocation,
    Bid,
    BidRequest,
    Goal,
    MonotonicClock,
    RescaleCost,
    ScalingCurve,
    make_bids,
    no_clock,
    place,
    solve,
)
from malletrain.core.change_costs import NodeLifetimes, StartCost, with_reread
from malletrain.core.pools import Pool, PoolNode, Trainer, pool_sizes
from malletrain.core.settings import ControllerSettings, PlanningSettings

_REREAD_S = attrgetter("reread_s")


@dataclass(frozen=True)
class Candidate:
    """A job in a plan."""

    job: str
    min_nodes: int
    max_nodes: int
    nodes: tuple[str, ...]
    weight: float = 1.0
    goal: Goal = Goal.THROUGHPUT
    curve: ScalingCurve | None = None
    """Scaling curve of its bids; None for the neutral prior."""
    sizes: tuple[int, ...] | None = None
    """Allowed numbers of nodes; None for every number from min to max."""
    cost: RescaleCost | None = None
    """Rescale cost of its bids; None for that of the settings."""
    fixed: bool = False
    """Whether it must keep its nodes, because it is rescaling or was rescaled recently."""
    must_run: bool = False
    """Whether its minimum is guaranteed."""
    broken: bool = False
    """Whether its workers must be restarted at any size."""
    owner: str | None = None
    """Owner whose pools it may use; None for all pools."""
    late_s: float = 0.0
    """Additional time before it can use its nodes, seconds."""
    trainer: Trainer | None = None
    """Trainer whose plan it is in; None if there is only one plan."""
    node_class: str = ""
    """Class of nodes that it may use; empty: any."""
    start: StartCost | None = None
    """Time until a process of a service is ready; None if ``cost`` has all its pauses."""

    def but(self, **changes: Any) -> Candidate:
        """Return a copy with these fields changed. It is several times faster than
        :func:`dataclasses.replace`, which matters in plans of hundreds of jobs.
        """
        copy = object.__new__(Candidate)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    def may_use(self, pool: Pool) -> bool:
        """Return whether it may run on nodes of this pool."""
        if not pool.is_of_class(self.node_class):
            return False
        return self.owner is None or pool.owner == self.owner

    @property
    def smallest(self) -> int | None:
        """The smallest size that it accepts; None if its sizes and limits allow none."""
        return smallest_size(self.min_nodes, self.max_nodes, self.sizes)


@dataclass(frozen=True)
class Plan:
    """Map from jobs to nodes, with the quality of the solution."""

    nodes: Mapping[str, tuple[str, ...]]
    objective: float
    """Value of the objective; NaN with several trainers."""
    gap: float
    """Relative duality gap."""
    solve_s: float
    """Time of the solver, seconds."""


class Solver(Protocol):
    """Decides a size for each job, from bids and the number of nodes of each pool."""

    def __call__(
        self, bids: Sequence[Bid[Pool]], capacity: Mapping[Pool, int], settings: PlanningSettings, /
    ) -> Allocation[Pool]:
        """Return the allocation."""
        ...


class Planner(Protocol):
    """Makes plans, see :func:`make_plan`."""

    def __call__(
        self,
        candidates: Sequence[Candidate],
        nodes: Mapping[str, PoolNode],
        settings: PlanningSettings,
        favoured: Collection[Pool] = (),
        /,
    ) -> Plan:
        """Return the plan."""
        ...


def exact(
    bids: Sequence[Bid[Pool]],
    capacity: Mapping[Pool, int],
    settings: PlanningSettings,
    clock: MonotonicClock = no_clock,
) -> Allocation[Pool]:
    """Solve with the allocator's exact solver; its time limit is measured on ``clock``."""
    return solve(bids, capacity, clock=clock, time_limit_s=settings.time_limit_s)


@lru_cache(maxsize=4096)
def smallest_size(min_nodes: int, max_nodes: int, sizes: tuple[int, ...] | None) -> int | None:
    """Return the smallest allowed size within the limits; None if there is none."""
    if sizes is None:
        return min_nodes
    return min((k for k in sizes if min_nodes <= k <= max_nodes), default=None)


def guarantees(
    holders: Iterable[Candidate],
    queue: Iterable[Candidate],
    free: Mapping[Pool, int],
    nodes: Mapping[str, PoolNode],
) -> set[str]:
    """Return the jobs that get their smallest size guaranteed.

    A job stays in its pool if possible; otherwise it gets the pool with the most remaining nodes.
    No job overtakes another in the queue. Otherwise a series of small jobs could delay a large one
    forever.

    Args:
        holders: jobs whose minimum is already guaranteed.
        queue: starving jobs, the next one first.
        free: pool → number of available nodes.
        nodes: all nodes of the plan.
    """
    remaining_nodes = dict(free)
    chosen = set()

    def granted(c: Candidate) -> bool:
        need = c.smallest
        own_pool = next((nodes[n].pool for n in c.nodes if n in nodes), None)
        best = max(
            filter(c.may_use, remaining_nodes),
            key=lambda pool: (
                remaining_nodes[pool] >= (need or 0) and pool == own_pool,
                remaining_nodes[pool],
            ),
            default=None,
        )
        if need is None or best is None or remaining_nodes[best] < need:
            return False
        remaining_nodes[best] -= need
        chosen.add(c.job)
        return True

    for c in holders:
        granted(c)
    for c in queue:
        if c.job not in chosen and not granted(c):
            break
    return chosen


def neutral_curve(largest: int, exponent: float, rate_one: float) -> ScalingCurve:
    """Return the prior of an unmeasured job: ``rate_one * nodes**exponent`` at 1, 2, 4, … and
    ``largest``.
    """
    sizes = {1, largest}
    k = 2
    while k < largest:
        sizes.add(k)
        k *= 2
    return ScalingCurve.of((k, rate_one * k**exponent) for k in sizes)


def make_plan(
    candidates: Sequence[Candidate],
    nodes: Mapping[str, PoolNode],
    settings: PlanningSettings,
    favoured: Collection[Pool] = (),
    *,
    solver: Solver = exact,
) -> Plan:
    """Give each candidate its nodes.

    Fixed candidates keep their nodes and do not bid.

    Args:
        candidates: jobs of the plan.
        nodes: all usable nodes. Nodes of candidates that are absent count as lost.
        settings: settings of the planner.
        favoured: pools that win a tie.
        solver: decides the sizes.

    Returns:
        A plan with every candidate as a key, with ``()`` if it gets no nodes.
    """
    current_nodes = {c.job: tuple(filter(nodes.__contains__, c.nodes)) for c in candidates}
    staying = {c.job: current_nodes[c.job] for c in candidates if c.fixed}
    fixed_nodes = {n for names in staying.values() for n in names}
    open_nodes = (
        {name: info for name, info in nodes.items() if name not in fixed_nodes}
        if fixed_nodes
        else nodes
    )
    capacity = pool_sizes(open_nodes)
    without_nodes: dict[str, tuple[str, ...]] = {c.job: () for c in candidates if not c.fixed}
    bidders = [c for c in candidates if not c.fixed and _fits(c, capacity)]
    if not bidders:
        return Plan({**without_nodes, **staying}, 0.0, 0.0, 0.0)
    requests = _requests(bidders, current_nodes, open_nodes, capacity, settings, favoured)
    bids = make_bids([request for request in requests if request.curves])
    allocation = solver(bids, capacity, settings)
    placed = place(
        allocation.sizes,
        {job: names for job, names in current_nodes.items() if job not in staying},
        open_nodes,
        {c.job for c in bidders if c.start is not None},
    )
    result = {c.job: tuple(placed.get(c.job, ())) for c in bidders}
    return Plan(
        {**without_nodes, **result, **staying},
        allocation.objective,
        allocation.gap,
        allocation.solve_s,
    )


def plan_each_trainer(
    planner: Planner,
    candidates: Sequence[Candidate],
    nodes: Mapping[str, PoolNode],
    settings: PlanningSettings,
    favoured: Collection[Pool] = (),
    /,
) -> Plan:
    """Make a plan for each trainer over its own nodes with ``planner``, and join the plans.

    A fixed candidate keeps its nodes even if they belong to another trainer since a change of the
    configuration.

    Args:
        planner: makes the plan of one trainer.
        candidates: jobs of all trainers, each with its trainer.
        nodes: all usable nodes, see :func:`make_plan`.
        settings: settings of the planner.
        favoured: pools that win a tie.
    """
    groups: dict[Trainer | None, list[Candidate]] = {}
    for c in candidates:
        groups.setdefault(c.trainer, []).append(c)
    fixed_nodes = {n: c.trainer for c in candidates if c.fixed for n in c.nodes if n in nodes}
    plans = []
    for trainer, group in groups.items():
        own_nodes = dict(nodes) if trainer is None else trainer.own(nodes)
        for name, holder in fixed_nodes.items():
            if holder is trainer:
                own_nodes[name] = nodes[name]
            else:
                own_nodes.pop(name, None)
        plans.append(planner(group, own_nodes, settings, favoured))
    return Plan(
        {job: names for plan in plans for job, names in plan.nodes.items()},
        math.nan if len(plans) > 1 else sum(plan.objective for plan in plans),
        max((plan.gap for plan in plans), default=0.0),
        sum(plan.solve_s for plan in plans),
    )


def _requests(
    bidders: Sequence[Candidate],
    current_nodes: Mapping[str, tuple[str, ...]],
    nodes: Mapping[str, PoolNode],
    capacity: Mapping[Pool, int],
    settings: PlanningSettings,
    favoured: Collection[Pool],
) -> list[BidRequest[Pool]]:
    """Return the request of each bidder.

    ``current_nodes``: job → the nodes that it still has.
    """
    requests, lifetimes = [], NodeLifetimes(nodes)
    some_unmeasured = any(c.curve is None for c in bidders)
    rate_one = _single_node_rate(bidders) if some_unmeasured else 1.0
    used_nodes = chain.from_iterable(current_nodes[c.job] for c in bidders)
    has_cached_data = any(map(_REREAD_S, map(nodes.__getitem__, used_nodes)))
    for c in bidders:
        curve = c.curve or neutral_curve(c.max_nodes, settings.prior_exponent, rate_one)
        current = current_nodes[c.job]
        curves = {
            pool: _raised(curve) if pool in favoured and len(capacity) > 1 else curve
            for pool in capacity
            if c.may_use(pool)
        }
        t_fwd_s = max(0.01 * settings.t_fwd_s, settings.t_fwd_s - c.late_s)
        cost = c.cost or settings.cost
        if has_cached_data:
            cost = with_reread(cost, [nodes[n].reread_s for n in current], settings.t_fwd_s)
        cost_in: dict[Pool, RescaleCost] = {}
        limits: dict[Pool, int] = {}
        if c.start is not None:
            terms = {
                pool: lifetimes.start_terms(
                    pool, current, c.start.expected_s(pool.node_class), t_fwd_s, cost
                )
                for pool in curves
            }
            cost_in = {pool: each.cost for pool, each in terms.items()}
            limits = {pool: each.limit for pool, each in terms.items()}
            # Nodes that are gone before its process is ready are of no use.
            curves = {
                pool: each
                for pool, each in curves.items()
                if limits[pool] >= (c.smallest or c.min_nodes)
            }
        requests.append(
            BidRequest(
                c,
                curves,
                len(current),
                nodes[current[0]].pool if current else None,
                t_fwd_s,
                cost,
                cost_in=cost_in,
                limits=limits,
            )
        )
    return requests


def _single_node_rate(bidders: Iterable[Candidate]) -> float:
    """Return the assumed throughput of an unmeasured job on one node, samples/s: the median of the
    other jobs, 1 without any.
    """
    rates = [rate for c in bidders if c.curve is not None and (rate := c.curve.at(1)) > 0]
    return median(rates) if rates else 1.0


def _raised(curve: ScalingCurve) -> ScalingCurve:
    """Return the curve, raised just enough to win a tie."""
    return ScalingCurve(tuple((nodes, rate * (1 + 1e-4)) for nodes, rate in curve.points))


def _fits(candidate: Candidate, capacity: Mapping[Pool, int]) -> bool:
    """Return whether a pool is large enough for the smallest size of the job."""
    smallest = candidate.smallest
    return smallest is not None and any(
        smallest <= count and candidate.may_use(pool) for pool, count in capacity.items()
    )


def freetrain_settings(settings: ControllerSettings) -> ControllerSettings:
    """Return the settings with FreeTrain's changes: starts are free, no job is profiled, no job
    gets nodes because it has waited, and there is no minimum time between rescales.
    """
    cost = replace(settings.planning.cost, start_s=0.0)
    planning = replace(settings.planning, cost=cost)
    return replace(
        settings, planning=planning, starvation_s=math.inf, min_interval_s=0.0, profiling=None
    )


def freetrain_plan(
    candidates: Sequence[Candidate],
    nodes: Mapping[str, PoolNode],
    settings: PlanningSettings,
    favoured: Collection[Pool] = (),
    *,
    solver: Solver,
) -> Plan:
    """Return a plan in which a job that lost a node can keep its remaining size at no cost.

    Args:
        candidates: jobs that bid.
        nodes: usable nodes by name.
        settings: from :func:`freetrain_settings`.
        favoured: pools that win a tie.
        solver: decides the sizes.
    """
    bids = [c.but(broken=False) for c in candidates]
    return make_plan(bids, nodes, settings, favoured, solver=solver)
