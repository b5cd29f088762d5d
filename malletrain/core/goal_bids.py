"""Changes the bids of jobs with a deadline or a budget. Pure.

Decides the values of the job's sizes relative to other jobs, and which sizes it offers. The result
is a curve and a list of sizes, as in any bid, so the allocator does not know about goals.

**Deadline.** A job's *need* is the speed that meets the deadline and the fewest nodes that reach it
(:mod:`malletrain.core.goal_keeper`). Up to the need, the value of a node is the most that it would
bring any job, times the site's weight. The weight is lower for later deadlines
(:data:`NEXT_DEADLINE_FACTOR`). The value is never less than in an ordinary bid. Beyond the need a
sample counts a little less than another job's: a job ahead of its deadline comes after jobs without
one, but uses free nodes.

**Budget.** The job offers all sizes at which the remaining work costs no more than the remaining
budget; the fastest of them ends earliest and wins. If there is none, or the amount of work is
unknown, it offers the sizes with the most samples per node-second. It offers no size that the
budget cannot pay for the forward-looking time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from allocator import Goal, ScalingCurve
from malletrain.core.planning import Candidate

YIELD_FACTOR_UNKNOWN_WORK = 0.8
"""Minimum samples per node-second of the sizes that a job with a budget and unknown work offers,
relative to the best size.
"""
YIELD_FACTOR_OVER_BUDGET = 0.95
"""The same for a job whose budget does not suffice."""
CURRENT_SIZE_FACTOR = 0.9
"""Factor on the required samples per node-second for the job's current size, because measured
throughputs are no more accurate than this.
"""
NEXT_DEADLINE_FACTOR = 0.8
"""Weight of a deadline relative to the previous one, so that the earliest is served first."""
MIN_DEADLINE_FACTOR = 0.3
"""Minimum of this weight."""
STEPS_PER_DOUBLING = 8
"""Number of rounding steps between two powers of two, so that small changes do not change bids."""


@dataclass(frozen=True)
class Need:
    """The nodes that a deadline needs."""

    nodes: int
    """Minimum number of nodes that meets it."""
    tight: float
    """Fraction from 0 (any amount of slack) to 1 (no slack)."""
    useful: int = 0
    """Maximum number of nodes with nearly the best throughput per node, on which early work costs
    little more.
    """


@dataclass(frozen=True)
class Purse:
    """The limits that a budget sets."""

    least_yield: float | None
    """Minimum samples per node-second; None if the amount of work is unknown."""
    most_nodes: float
    """Maximum number of nodes that the budget can pay for the forward-looking time."""


@dataclass(frozen=True)
class GoalTerms:
    """The effect of one job's goals on its bid."""

    curve: ScalingCurve | None = None
    """Known or assumed scaling curve, as for a plan."""
    need: Need | None = None
    """Need of an admitted deadline; None if there is none."""
    purse: Purse | None = None
    """Limits of the budget; None without a budget."""
    before: int = 0
    """Number of admitted deadlines before its own."""


def price_of_a_node(candidates: Iterable[Candidate]) -> float:
    """Return the maximum, over these jobs, of the best throughput per node, in units of bids per
    second.
    """
    return max(
        (_unit(c, c.curve) * c.curve.best_rate_per_node for c in candidates if c.curve), default=0.0
    )


def _unit(candidate: Candidate, curve: ScalingCurve) -> float:
    """Return the value of a sample of the job in a plan."""
    if candidate.goal is Goal.EFFICIENCY and curve.at(1) > 0:
        return candidate.weight / curve.at(1)
    return candidate.weight


def rounded(value: float, *, up: bool = False) -> float:
    """Return the value, rounded to the nearest of :data:`STEPS_PER_DOUBLING` steps between two
    powers of two (``up``: rounded up).
    """
    if not (value > 0 and math.isfinite(value)):
        return value
    steps = math.log2(value) * STEPS_PER_DOUBLING
    return float(2.0 ** ((math.ceil(steps - 1e-9) if up else round(steps)) / STEPS_PER_DOUBLING))


@lru_cache(maxsize=4096)
def worth(
    curve: ScalingCurve,
    unit: float,
    need: tuple[int, int],
    node_worth: tuple[float, float],
    ahead: float,
) -> ScalingCurve:
    """Return the curve of a job with a deadline, in units of bids per second.

    Args:
        curve: samples/s by number of nodes.
        unit: value of a sample in a plan.
        need: minimum number of nodes that meets the deadline, and maximum number of useful nodes.
        node_worth: value of a node up to the minimum, and of a further useful node.
        ahead: weight of samples beyond that, relative to those of other jobs.
    """
    min_nodes, useful = need[0], max(need)
    sizes, rates = curve.arrays
    if min_nodes not in sizes or useful not in sizes:
        sizes = np.union1d(sizes, (min_nodes, useful))
        rates = curve.rates(sizes)
    plain = unit * rates
    early = np.maximum(0, sizes - min_nodes)
    within_need = np.maximum(plain, node_worth[0] * (sizes - early) + node_worth[1] * early)
    position = int(sizes.searchsorted(useful))
    beyond_need = within_need[position] + ahead * (plain - plain[position])
    return ScalingCurve.from_arrays(
        sizes, np.where(sizes <= useful, within_need, np.maximum(0.0, beyond_need))
    )


def payable(candidate: Candidate, curve: ScalingCurve | None, purse: Purse) -> tuple[int, ...]:
    """Return the sizes that a job with a budget offers."""
    current_size = len(candidate.nodes)
    sizes = _allowed(candidate.min_nodes, candidate.max_nodes, candidate.sizes)
    sizes = sizes[(sizes <= purse.most_nodes) | (sizes == current_size)]
    if curve is not None and len(sizes):
        yields = curve.rates(sizes) / sizes
        best_yield = float(yields.max())
        if purse.least_yield is None:
            min_yield = YIELD_FACTOR_UNKNOWN_WORK * best_yield
        else:
            min_yield = (
                purse.least_yield
                if purse.least_yield <= best_yield
                else YIELD_FACTOR_OVER_BUDGET * best_yield
            )
        sizes = sizes[
            yields >= np.where(sizes == current_size, CURRENT_SIZE_FACTOR * min_yield, min_yield)
        ]
    return tuple(sizes.tolist())


@lru_cache(maxsize=4096)
def _allowed(low: int, high: int, sizes: tuple[int, ...] | None) -> npt.NDArray[np.int64]:
    if sizes is None:
        return np.arange(low, high + 1)
    return np.array([k for k in sizes if low <= k <= high], dtype=np.int64)


def with_goals(
    candidates: Sequence[Candidate],
    terms: Mapping[str, GoalTerms],
    deadline_weight: float,
    ahead: float,
) -> list[Candidate]:
    """Return the candidates, with bids that follow their goals.

    Args:
        candidates: candidates of one plan.
        terms: job → the effect of its goals; jobs without goals are absent.
        deadline_weight: maximum ratio of the value of a node that a deadline needs to its value for
            another job.
        ahead: weight of samples beyond a deadline's need, relative to those of other jobs.
    """
    if not terms:
        return list(candidates)
    price = price_of_a_node(candidates)
    candidates_ = []
    for c in candidates:
        term = terms.get(c.job)
        if term is not None and term.purse is not None:
            # A running job keeps offering its size. The keeper halts it once its budget is spent.
            sizes = payable(c, term.curve, term.purse)
            if not sizes:
                continue
            c = c.but(sizes=sizes)
        if term is not None and term.need is not None and term.curve is not None:
            c = _in_time(
                c, c.curve or term.curve, term.need, term.before, price, deadline_weight, ahead
            )
        candidates_.append(c)
    return candidates_


def _in_time(
    c: Candidate,
    curve: ScalingCurve,
    need: Need,
    before: int,
    price: float,
    deadline_weight: float,
    ahead: float,
) -> Candidate:
    unit = _unit(c, curve)
    # If no throughput is known, the value of a node is the job's own best throughput per node.
    price = price or unit * curve.best_rate_per_node
    urgent = deadline_weight * max(MIN_DEADLINE_FACTOR, NEXT_DEADLINE_FACTOR**before)
    node_worth = rounded(price * urgent), rounded(price * min(1.0, urgent) * ahead)
    in_plan = worth(curve, unit, (need.nodes, need.useful), node_worth, ahead)
    return c.but(curve=in_plan, weight=1.0, goal=Goal.THROUGHPUT)
