"""How a deadline or a budget changes a job's bid. Pure.

Decides the values of the job's sizes relative to other jobs, and which sizes it offers. It
expresses that as a curve and a list of sizes, as in any bid, so the allocator knows nothing of
goals.

**Deadline.** A job's *need* is the speed that meets the deadline and the fewest nodes that reach it
(:mod:`malletrain.core.goal_keeper`). Up to the need, a node is worth what it would bring the job
that makes the most of it, times the site's weight, times how tight the deadline is (0: any time
will do, 1: no slack): never less than in an ordinary bid, never more than the weight times what
others lose. Beyond the need a sample counts a little less than another job's: a job ahead of its
deadline comes after jobs without one, but uses what is free.

**Budget.** All sizes are offered at which the remaining work costs no more than the remaining
budget; the fastest of them wins, which ends earliest. If there is none, or the amount of work is
unknown, the sizes with the most samples per node-second are offered. No size is offered that the
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

UNKNOWN_WORK = 0.8
"""A job with a budget and unknown work offers sizes that bring so much of the most a node-second
can bring."""
NO_WORSE = 0.95
"""The same for one whose budget is not enough."""
HELD = 0.9
"""The size it has is still offered when its node-time brings so much of what is needed: the
measured speed is not known better.
"""
LATER = 0.8
"""What a deadline counts of the one before it: the earliest is served first."""
EASY = 0.3
"""What it counts at least."""
STEPS = 8
"""Steps of a worth between two powers of two: bids that hardly change stay the same bids."""


@dataclass(frozen=True)
class Need:
    """What a deadline asks for."""

    nodes: int
    """The fewest that hold it."""
    tight: float
    """From 0, any time will do, to 1, there is no slack left."""
    useful: int = 0
    """As many as bring nearly as much each as they ever do: work done early costs little more."""


@dataclass(frozen=True)
class Purse:
    """What a budget allows."""

    least_yield: float | None
    """Samples that a node-second has to bring; None: nobody knows how much work there is."""
    most_nodes: float
    """More than these cannot be paid for the time a plan looks ahead."""


@dataclass(frozen=True)
class GoalTerms:
    """What the goals of one job say to its bid. ``curve``: what is known or assumed of its speed,
    as the plan would have it.
    """

    curve: ScalingCurve | None = None
    need: Need | None = None
    purse: Purse | None = None
    before: int = 0
    """Deadlines that are held and come before its own."""


def price_of_a_node(candidates: Iterable[Candidate]) -> float:
    """The most that a node brings any of these jobs, in the unit of bids a second."""
    return max(
        (_unit(c, c.curve) * c.curve.best_rate_per_node for c in candidates if c.curve), default=0.0
    )


def _unit(candidate: Candidate, curve: ScalingCurve) -> float:
    """What a sample of the job counts in a plan."""
    if candidate.goal is Goal.EFFICIENCY and curve.at(1) > 0:
        return candidate.weight / curve.at(1)
    return candidate.weight


def rounded(value: float, *, up: bool = False) -> float:
    """The value, to the next of :data:`STEPS` between two powers of two (``up``: not below it)."""
    if not (value > 0 and math.isfinite(value)):
        return value
    steps = math.log2(value) * STEPS
    return float(2.0 ** ((math.ceil(steps - 1e-9) if up else round(steps)) / STEPS))


@lru_cache(maxsize=4096)
def worth(
    curve: ScalingCurve,
    unit: float,
    need: tuple[int, int],
    node_worth: tuple[float, float],
    ahead: float,
) -> ScalingCurve:
    """The curve of a job with a deadline, in the unit of bids a second.

    Args:
        curve: samples/s by nodes.
        unit: what a sample counts in a plan.
        need: the fewest nodes that hold the deadline, and as many as are of good use.
        node_worth: what one of the former is worth, and one of the others.
        ahead: what samples beyond that count, beside those of other jobs.
    """
    least, useful = need[0], max(need)
    sizes, rates = curve.arrays
    if least not in sizes or useful not in sizes:
        sizes = np.union1d(sizes, (least, useful))
        rates = curve.rates(sizes)
    plain = unit * rates
    early = np.maximum(0, sizes - least)
    within = np.maximum(plain, node_worth[0] * (sizes - early) + node_worth[1] * early)
    place = int(sizes.searchsorted(useful))
    beyond = within[place] + ahead * (plain - plain[place])
    return ScalingCurve.from_arrays(
        sizes, np.where(sizes <= useful, within, np.maximum(0.0, beyond))
    )


def payable(candidate: Candidate, curve: ScalingCurve | None, purse: Purse) -> tuple[int, ...]:
    """The sizes that a job with a budget offers."""
    current_size = len(candidate.nodes)
    sizes = _allowed(candidate.min_nodes, candidate.max_nodes, candidate.sizes)
    sizes = sizes[(sizes <= purse.most_nodes) | (sizes == current_size)]
    if curve is not None and len(sizes):
        brings = curve.rates(sizes) / sizes
        most = float(brings.max())
        if purse.least_yield is None:
            least = UNKNOWN_WORK * most
        else:
            least = purse.least_yield if purse.least_yield <= most else NO_WORSE * most
        sizes = sizes[brings >= np.where(sizes == current_size, HELD * least, least)]
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
    """The same candidates, those with goals bidding as their goals say.

    Args:
        candidates: of one plan.
        terms: job → what its goals say; jobs without goals are not in it.
        deadline_weight: a node that a deadline needs counts at most so many times what it would
            bring another job.
        ahead: what samples beyond a deadline's need count, beside those of other jobs.
    """
    if not terms:
        return list(candidates)
    price = price_of_a_node(candidates)
    candidates_ = []
    for c in candidates:
        term = terms.get(c.job)
        if term is not None and term.purse is not None:
            # A job that may stay may stay: that it can pay no more is the keeper's to see.
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
    # Where no speed is known of anybody, what it makes of them itself is what nodes are worth.
    price = price or unit * curve.best_rate_per_node
    urgent = deadline_weight * max(EASY, LATER**before)
    node_worth = rounded(price * urgent), rounded(price * min(1.0, urgent) * ahead)
    in_plan = worth(curve, unit, (need.nodes, need.useful), node_worth, ahead)
    return c.but(curve=in_plan, weight=1.0, goal=Goal.THROUGHPUT)
