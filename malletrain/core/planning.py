"""From the controller's state to a plan: builds bids, calls the allocator, and chooses the nodes.
Pure.

Decides for which jobs there is room to guarantee their minimum, and what a job with an unknown
curve is worth. The queue decides which jobs may bid and in which order they wait, the allocator how
many nodes each gets and which ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Protocol

from allocator import (
    Allocation,
    Bid,
    BidRequest,
    Goal,
    LossForecast,
    MonotonicClock,
    NodeInfo,
    RescaleCost,
    ScalingCurve,
    make_bids,
    no_clock,
    place,
    solve,
)
from malletrain.core.expected_node_life import ExpectedNodeLife
from malletrain.core.pools import class_counts, owner_of
from malletrain.core.settings import PlanningSettings
from malletrain.core.trainers import Trainer


@dataclass(frozen=True)
class Candidate:
    """One job as the plan sees it."""

    job: str
    min_nodes: int
    max_nodes: int
    nodes: tuple[str, ...]
    weight: float = 1.0
    goal: Goal = Goal.THROUGHPUT
    curve: ScalingCurve | None = None
    sizes: tuple[int, ...] | None = None
    cost: RescaleCost | None = None
    fixed: bool = False
    """Leave it at its size: a rescale is under way, or was a moment ago."""
    must_run: bool = False
    """Its minimum is guaranteed."""
    broken: bool = False
    """Its workers have to be started again at whatever size."""
    owner: str | None = None
    """It may only have nodes of pools of this owner; None: of all."""
    late_s: float = 0.0
    """What it would do on its nodes comes so much later than a plan takes it to, seconds."""
    trainer: Trainer | None = None
    """Whose plan it is in; None: there is one only."""

    def but(self, **changes: Any) -> Candidate:
        """The same but for these fields: :func:`dataclasses.replace` for plans of hundreds of jobs,
        several times as fast.
        """
        made = object.__new__(Candidate)
        made.__dict__.update(self.__dict__, **changes)
        return made

    def may_use(self, pool: str) -> bool:
        """Whether it may run on nodes of this pool."""
        if self.trainer is not None and not self.trainer.may_use(pool):
            return False
        return self.owner is None or owner_of(pool) == self.owner

    @property
    def smallest(self) -> int | None:
        """The smallest size it accepts, ``None`` when its sizes and limits leave none."""
        return smallest_size(self.min_nodes, self.max_nodes, self.sizes)


@dataclass(frozen=True)
class Plan:
    """The jobs-to-nodes map with the proof of its quality (``gap`` relative, ``solve_s``
    seconds). ``objective`` is not a number where it was planned for several trainers.
    """

    nodes: Mapping[str, tuple[str, ...]]
    objective: float
    gap: float
    solve_s: float


class Solver(Protocol):
    """Who decides the sizes: bids and nodes of each class in, a size for each job out."""

    def __call__(
        self, bids: Sequence[Bid], capacity: Mapping[str, int], settings: PlanningSettings, /
    ) -> Allocation:
        """The allocation."""
        ...


class Planner(Protocol):
    """Who makes plans, see :func:`make_plan`."""

    def __call__(
        self,
        candidates: Sequence[Candidate],
        nodes: Mapping[str, NodeInfo],
        settings: PlanningSettings,
        favoured: Collection[str] = (),
        /,
    ) -> Plan:
        """The plan."""
        ...


def exact(
    bids: Sequence[Bid],
    capacity: Mapping[str, int],
    settings: PlanningSettings,
    clock: MonotonicClock = no_clock,
) -> Allocation:
    """The product's solver, its time limit kept on ``clock``."""
    return solve(bids, capacity, clock=clock, time_limit_s=settings.time_limit_s)


@lru_cache(maxsize=4096)
def smallest_size(min_nodes: int, max_nodes: int, sizes: tuple[int, ...] | None) -> int | None:
    """The smallest allowed size within the limits, ``None`` when there is none."""
    if sizes is None:
        return min_nodes
    return min((k for k in sizes if min_nodes <= k <= max_nodes), default=None)


def guarantees(
    holders: Iterable[Candidate],
    queue: Iterable[Candidate],
    free: Mapping[str, int],
    nodes: Mapping[str, NodeInfo],
) -> set[str]:
    """Which of the jobs whose minimum is guaranteed now (``holders``) and of those that starve
    (``queue``, the first first) get to run.

    ``free``: pool → nodes to share out. Each needs its smallest size; it stays in its pool if it
    can, else goes where most nodes are left. Nobody overtakes in the queue of its trainer: else
    small jobs, one after the other, would keep a large one out for ever.
    """
    remaining_nodes = dict(free)
    chosen = set()

    def granted(c: Candidate) -> bool:
        need = c.smallest
        mine = next((nodes[n].node_class for n in c.nodes if n in nodes), "")
        best = max(
            filter(c.may_use, remaining_nodes),
            key=lambda name: (
                remaining_nodes[name] >= (need or 0) and name == mine,
                remaining_nodes[name],
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
    behind: set[Trainer | None] = set()
    for c in queue:
        if c.job not in chosen and c.trainer not in behind and not granted(c):
            behind.add(c.trainer)
    return chosen


def neutral_curve(largest: int, exponent: float, rate_one: float) -> ScalingCurve:
    """The prior of a job nobody has measured: ``rate_one * nodes**exponent`` at 1, 2, 4, … and
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
    nodes: Mapping[str, NodeInfo],
    settings: PlanningSettings,
    favoured: Collection[str] = (),
    *,
    solver: Solver = exact,
) -> Plan:
    """Give each candidate its nodes.

    ``nodes``: every usable node, its pool as its class; the candidates' own nodes that are not in
    it count as lost. Jobs that are ``fixed`` keep theirs and take no part. Every candidate is a key
    of the result, with ``()`` where it gets none. ``favoured``: classes that win a tie. ``solver``:
    who decides the sizes.
    """
    current_nodes = {c.job: tuple(filter(nodes.__contains__, c.nodes)) for c in candidates}
    staying = {c.job: current_nodes[c.job] for c in candidates if c.fixed}
    taken = {n for names in staying.values() for n in names}
    open_nodes = (
        {name: info for name, info in nodes.items() if name not in taken} if taken else nodes
    )
    capacity = class_counts(open_nodes)
    nothing: dict[str, tuple[str, ...]] = {c.job: () for c in candidates if not c.fixed}
    bidders = [c for c in candidates if not c.fixed and _fits(c, capacity)]
    if not bidders:
        return Plan({**nothing, **staying}, 0.0, 0.0, 0.0)
    single_node_rates = [
        c.curve.at(1) for c in bidders if c.curve is not None and c.curve.at(1) > 0
    ]
    rate_one = median(single_node_rates) if single_node_rates else 1.0
    bids = make_bids(
        _requests(bidders, current_nodes, open_nodes, capacity, settings, favoured, rate_one)
    )
    allocation = solver(bids, capacity, settings)
    placed = place(
        allocation.sizes,
        {job: names for job, names in current_nodes.items() if job not in staying},
        open_nodes,
    )
    result = {c.job: tuple(placed.get(c.job, ())) for c in bidders}
    return Plan(
        {**nothing, **result, **staying}, allocation.objective, allocation.gap, allocation.solve_s
    )


def _requests(
    bidders: Sequence[Candidate],
    current_nodes: Mapping[str, tuple[str, ...]],
    nodes: Mapping[str, NodeInfo],
    capacity: Mapping[str, int],
    settings: PlanningSettings,
    favoured: Collection[str],
    rate_one: float,
) -> list[BidRequest]:
    """The request of each bidder, with the forecast losses of nodes if plans use them.

    ``current_nodes``: job → the nodes that it still has; ``rate_one``: throughput that an
    unmeasured job is taken to have on one node, samples/s.
    """
    pools = [[name for name in capacity if c.may_use(name)] for c in bidders]
    outlooks: list[dict[str, LossForecast]] = [{} for _ in bidders]
    if settings.look_ahead_s and settings.heed_lifetimes:
        nodes_of_bidders = [current_nodes[c.job] for c in bidders]
        node_life = ExpectedNodeLife(
            nodes, nodes_of_bidders, settings.look_ahead_s, settings.lost_work_s
        )
        for name in capacity:
            jobs = [number for number, mine in enumerate(pools) if name in mine]
            most = [bidders[number].max_nodes for number in jobs]
            for number, outlook in zip(jobs, node_life.in_pool(name, jobs, most), strict=True):
                outlooks[number][name] = outlook
    requests = []
    for c, mine, foretold in zip(bidders, pools, outlooks, strict=True):
        curve = c.curve or neutral_curve(c.max_nodes, settings.prior_exponent, rate_one)
        current = current_nodes[c.job]
        curves = {
            name: _better(curve) if name in favoured and len(capacity) > 1 else curve
            for name in mine
        }
        requests.append(
            BidRequest(
                c.job,
                curves,
                len(current),
                nodes[current[0]].node_class if current else "default",
                c.min_nodes,
                c.max_nodes,
                c.sizes,
                c.weight,
                c.goal,
                max(0.01 * settings.t_fwd_s, settings.t_fwd_s - c.late_s),
                c.cost or settings.cost,
                must_run=c.must_run,
                restarting=c.broken,
                loss_forecasts=foretold,
            )
        )
    return requests


def _better(curve: ScalingCurve) -> ScalingCurve:
    """The curve, a little better: enough to win a tie."""
    return ScalingCurve(tuple((nodes, rate * (1 + 1e-4)) for nodes, rate in curve.points))


def _fits(candidate: Candidate, capacity: Mapping[str, int]) -> bool:
    """Whether some size that the job accepts is there at all."""
    largest = max((count for pool, count in capacity.items() if candidate.may_use(pool)), default=0)
    return candidate.smallest is not None and candidate.smallest <= largest
