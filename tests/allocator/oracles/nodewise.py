"""The node-by-node formulation of FreeTrain (BFTrainer), kept as a reference for tests and
benchmarks.

Decides nothing for the product: it finds the same optimum as :mod:`allocator.milp`, orders of
magnitude slower, because it names nodes that are interchangeable. The model is that of arXiv
2106.12091, section 3, and of the published replayer: binary ``x[j,n]`` (job j has node n),
``xor[j,n]`` (that changes), an either-or of growing and shrinking with a big M that forbids
migration, flags for the cost of growing and shrinking, and throughput interpolated between the
points of the curve (SOS2; HiGHS has no SOS2, so a binary per segment says which one is used).

Two forms are kept, see :data:`FORMS`. As published, three things go wrong:

* the big M of the no-migration pair is nodes + 1. A change of k nodes needs ``2 k <= M`` there, so
  that no job can grow or shrink by more than half the machine, and a job that holds more than half
  of it cannot even be stopped (where its limits ask for that, the model has no solution);
* costs are charged at the throughput before the change, so that starting from nothing costs
  nothing;
* a plan found but not proven optimal when time is up is thrown away, and every job is stopped.

The corrected form takes M = 2 · nodes + 1, charges starts as the bids of
:mod:`allocator.valuation` do, and keeps the plan it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from allocator.bids import SUMMIT_RESCALE_COST, Allocation, BidError, RescaleCost, relative_gap
from allocator.curves import ScalingCurve
from allocator.highs import InfeasibleError, LinearProgram, maximise


class Form(str, Enum):
    """Version of the model."""

    PUBLISHED = "published"
    CORRECTED = "corrected"


@dataclass(frozen=True)
class _Rules:
    migration_m_per_node: int
    charge_start: bool
    keep_unproven: bool


FORMS = {
    Form.PUBLISHED: _Rules(migration_m_per_node=1, charge_start=False, keep_unproven=False),
    Form.CORRECTED: _Rules(migration_m_per_node=2, charge_start=True, keep_unproven=True),
}


@dataclass(frozen=True)
class NodewiseJob:
    """One job: its curve, its limits, and the nodes it runs on now."""

    name: str
    curve: ScalingCurve
    min_nodes: int
    max_nodes: int
    current: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class NodewisePlan:
    """Sizes and proof in ``allocation``, nodes by job in ``nodes``."""

    allocation: Allocation
    nodes: dict[str, tuple[str, ...]]


@dataclass
class _Builder:
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, binary: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(1.0)
        self.integral.append(binary)
        return len(self.cost) - 1

    def row(
        self, terms: Sequence[tuple[int, float]], low: float = -np.inf, high: float = np.inf
    ) -> None:
        self.entries += [(variable, len(self.limits), x) for variable, x in terms]
        self.limits.append((low, high))

    def model(self) -> LinearProgram:
        column, row, x = (np.array(part) for part in zip(*sorted(self.entries), strict=True))
        limits = np.array(self.limits)
        return LinearProgram(
            cost=np.array(self.cost),
            lower=np.zeros(len(self.cost)),
            upper=np.array(self.upper),
            integral=np.array(self.integral),
            starts=np.searchsorted(column, np.arange(len(self.cost) + 1)),
            rows=row.astype(np.int64),
            coefficients=x.astype(np.float64),
            row_lower=limits[:, 0],
            row_upper=limits[:, 1],
        )


def solve(
    jobs: Sequence[NodewiseJob],
    nodes: Sequence[str],
    *,
    t_fwd_s: float = 120.0,
    cost: RescaleCost = SUMMIT_RESCALE_COST,
    form: Form = Form.CORRECTED,
    time_limit_s: float = 60.0,
) -> NodewisePlan:
    """Nodes by job that maximise ``T_fwd · throughput - rescale costs`` (samples), node by node.

    The status is that of :class:`allocator.bids.Allocation`, or ``infeasible`` (the published
    form only).

    Raises:
        BidError: when a job runs on a node that is not among ``nodes``, or two jobs on one.
    """
    rules = FORMS[form]
    index = {name: n for n, name in enumerate(nodes)}
    holder: dict[str, str] = {}
    for job in jobs:
        for name in job.current:
            if name not in index:
                raise BidError(
                    f"Job {job.name} runs on {name}, which is not among the nodes given."
                )
            if holder.setdefault(name, job.name) != job.name:
                raise BidError(
                    f"Node {name} belongs to both {holder[name]} and {job.name}; a node runs "
                    "one job."
                )
    if not jobs or not nodes:
        return NodewisePlan(Allocation({}, 0.0, 0.0, 0.0, "optimal"), {})
    scale = max(
        1.0, t_fwd_s * max(job.weight * max(rate for _, rate in job.curve.points) for job in jobs)
    )
    build = _Builder()
    x = [_add_job(build, job, index, t_fwd_s, cost, rules, scale) for job in jobs]
    for n in range(len(nodes)):
        build.row([(columns[n], 1.0) for columns in x], high=1.0)
    try:
        answer = maximise(build.model(), time_limit_s=time_limit_s)
    except InfeasibleError:
        return NodewisePlan(Allocation({}, -np.inf, -np.inf, np.inf, "infeasible"), {})
    chosen: dict[str, tuple[str, ...]] = {}
    if answer.x is not None and (answer.optimal or rules.keep_unproven):
        for job, columns in zip(jobs, x, strict=True):
            has = {name for name, n in index.items() if answer.x[columns[n]] > 0.5}
            staying = tuple(name for name in job.current if name in has)
            chosen[job.name] = staying + tuple(
                name for name in nodes if name in has and name not in staying
            )
    sizes = {name: ("default", len(has)) for name, has in chosen.items() if has}
    objective = answer.objective * scale if chosen else -np.inf
    bound = objective if answer.optimal else answer.bound * scale
    status = "optimal" if answer.optimal else "time_limit"
    gap = relative_gap(objective, bound) if chosen else np.inf
    return NodewisePlan(Allocation(sizes, objective, bound, gap, status), chosen)


def _add_job(
    build: _Builder,
    job: NodewiseJob,
    index: dict[str, int],
    t_fwd_s: float,
    cost: RescaleCost,
    rules: _Rules,
    scale: float,
) -> list[int]:
    """Variables and rows of one job; return its ``x`` by node. The model's unit is ``scale``
    samples.
    """
    total, before = len(index), len(job.current)
    m = float(total + 1)
    rate_before = job.weight * job.curve.at(before) / scale
    seconds = t_fwd_s - (cost.start_s if before == 0 and rules.charge_start else 0.0)
    x = [build.variable() for _ in range(total)]
    size = [(v, 1.0) for v in x]

    # Nothing, or between the limits.
    idle = build.variable()
    build.row([*size, (idle, float(job.min_nodes))], low=float(job.min_nodes))
    build.row([*size, (idle, float(job.max_nodes))], high=float(job.max_nodes))

    # No migration: the nodes that change are as many as the size changes by (up) or minus that
    # (down).
    changed = [build.variable() for _ in range(total)]
    current = {index[name] for name in job.current}
    for n in range(total):
        c = 1.0 if n in current else 0.0
        build.row([(changed[n], 1.0), (x[n], -1.0)], high=c)
        build.row([(changed[n], 1.0), (x[n], -1.0)], low=-c)
        build.row([(changed[n], 1.0), (x[n], 1.0)], low=c)
        build.row([(changed[n], 1.0), (x[n], 1.0)], high=2.0 - c)
    shrinks = build.variable()
    big = float(rules.migration_m_per_node * total + 1)
    minus = [(v, -1.0) for v in changed]
    plus = [(v, 1.0) for v in changed]
    build.row([*size, *minus, (shrinks, big)], low=float(before))
    build.row([*size, *plus, (shrinks, big)], high=before + big)

    # Throughput between the points of the curve; 0 nodes are a point of their own.
    points = _points(job, total)
    weights = [
        build.variable(seconds * job.weight * rate / scale, binary=False) for _, rate in points
    ]
    nothing = build.variable(binary=False)
    build.row([(w, 1.0) for w in (nothing, *weights)], low=1.0, high=1.0)
    build.row(
        [*size, *((w, -float(k)) for w, (k, _) in zip(weights, points, strict=True))],
        low=0.0,
        high=0.0,
    )
    segments = [build.variable() for _ in range(max(1, len(points) - 1))]
    build.row([*((s, 1.0) for s in segments), (idle, 1.0)], low=1.0, high=1.0)
    build.row([(nothing, 1.0), (idle, -1.0)], high=0.0)
    for i, w in enumerate(weights):
        beside = [segments[s] for s in (i - 1, i) if 0 <= s < len(segments)]
        build.row([(w, 1.0), *((s, -1.0) for s in beside)], high=0.0)

    # What growing and shrinking cost.
    grows = build.variable(-rate_before * cost.up_s)
    falls = build.variable(-rate_before * cost.down_s)
    build.row([*size, (grows, -m)], high=float(before))
    build.row([*size, (falls, float(before))], low=float(before))
    return x


def _points(job: NodewiseJob, total: int) -> list[tuple[int, float]]:
    """The curve's points within the job's limits, and its values at the limits."""
    low, high = job.min_nodes, max(job.min_nodes, min(total, job.max_nodes))
    inside = sorted({low, high, *(k for k, _ in job.curve.points if low < k < high)})
    return [(k, job.curve.at(k)) for k in inside]
