"""Tracks a job with goals or known work: its charges, real throughput, remaining work, and whether
it meets its deadline and budget.

A job is charged for a node from when it gets it until it leaves it, times the site's factor. If the
site charges a minimum time for each lease, the job that left the node pays the rest of it, unless
another job takes the node over before.

Decides how predicted and real throughput are combined, which forecasts are good enough, and whether
more nodes can improve a bad one. The *pace* is the fraction of its curve that a job achieves on its
nodes. It includes pauses, lost work and errors of the curve. :mod:`malletrain.core.goal_keeper`
decides when to evaluate and what follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from allocator import ScalingCurve
from malletrain.core.forecast import Floats, Forecast
from malletrain.core.goal_bids import Need, rounded
from malletrain.core.goals import GoalStanding, OwnerGoals
from malletrain.core.planning import neutral_curve
from malletrain.core.records import JobRecord


@dataclass
class _Hold:
    """One node of one job."""

    since: float
    paid_until: float
    """Time before which staying costs nothing more, because of the lease's minimum charge."""
    price: float = 1.0
    """Node-seconds that one second of the node counts."""


@dataclass
class JobAccount:
    """The charges of one job. Times in seconds on the shell's clock, costs in node-seconds."""

    factor: float = 1.0
    """Charged node-seconds per node-second of a lease."""
    charged_before: float = 0.0
    """Charges of ended holds, and of the time before the controller was created."""
    holds: dict[str, _Hold] = field(default_factory=dict)
    owed: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Node that it left → end of the minimum charge, and its price."""
    _rate: float = 0.0
    """Sum of the prices of the nodes that it holds."""
    _since: float = 0.0
    """Sum of the times since which it holds them, each times the price."""
    _paid_until: float = -math.inf

    def takes(self, node: str, since: float, paid_until: float, price: float = 1.0) -> None:
        """Add a node that it holds since ``since``, of which a second counts ``price``
        node-seconds.
        """
        self.holds[node] = _Hold(since, paid_until, price)
        self.owed.pop(node, None)
        self._rate += price
        self._since += price * since
        self._paid_until = max(self._paid_until, paid_until)

    def reprice(self, node: str, price: float) -> None:
        """Set the price of a node that it holds, from the time on since which it holds it."""
        hold = self.holds[node]
        self._rate += price - hold.price
        self._since += (price - hold.price) * hold.since
        hold.price = price

    def leaves(self, node: str, now: float) -> None:
        """Remove a node that it no longer holds."""
        hold = self.holds.pop(node)
        self._rate = self._rate - hold.price if self.holds else 0.0
        self._since = self._since - hold.price * hold.since if self.holds else 0.0
        held_s = max(now, hold.paid_until) - hold.since
        self.charged_before += self.factor * hold.price * held_s
        if hold.paid_until > now:
            self.owed[node] = hold.paid_until, hold.price

    def taken_over(self, nodes: Collection[str], now: float) -> None:
        """Drop the rest of the minimum charge of these nodes, which other jobs have now."""
        for node in [n for n in self.owed if n in nodes]:
            paid_until, price = self.owed.pop(node)
            self.charged_before -= self.factor * price * max(0.0, paid_until - now)

    def gone(self, node: str) -> None:
        """Keep the rest of the minimum charge of a node that it left: its lease has ended."""
        del self.owed[node]

    def charged(self, now: float) -> float:
        """Return its charge in node-seconds if it leaves all its nodes now."""
        if now >= self._paid_until:  # nearly always, so no loop is needed
            open_s = self._rate * now - self._since
        else:
            open_s = sum(
                hold.price * (max(now, hold.paid_until) - hold.since)
                for hold in self.holds.values()
            )
        return self.charged_before + self.factor * open_s

    def costs_more_at(self, budget_s: float, now: float) -> float:
        """Return the time at which its charge exceeds ``budget_s`` if it stays on its nodes;
        infinite without nodes.
        """
        remaining_s = budget_s - self.charged(now)
        if self.holds and remaining_s > 0 and now >= self._paid_until:
            return now + remaining_s / (self.factor * self._rate)
        ends = sorted((max(now, hold.paid_until), hold.price) for hold in self.holds.values())
        if not ends:
            return math.inf
        # rate: sum of the prices of the nodes that are charged by then
        time, rate = ends[0][0], 0.0
        if remaining_s <= 0:
            return time
        for end, price in [*ends, (math.inf, 0.0)]:
            if rate and self.factor * rate * (end - time) >= remaining_s:
                return time + remaining_s / (self.factor * rate)
            remaining_s -= self.factor * rate * (end - time) if rate else 0.0
            time, rate = end, rate + price
        return math.inf


RECOVERY_SLACK = 0.05
"""A job at risk is on track again when 90 % of its forecast ends leave at least this fraction of
the remaining time.
"""
AT_RISK_FACTOR = 1.15
"""A budget is at risk if it would not suffice for a job that is slower than expected by this
factor.
"""

SENTENCES = {
    GoalStanding.ON_TRACK: "Nine of ten forecasts hold the job's deadline and budget.",
    GoalStanding.AT_RISK: "More than one of ten forecasts breaks the job's deadline or budget.",
    GoalStanding.INFEASIBLE: "The deadline or the budget can no longer be met with as many nodes "
    "as in the last days.",
    GoalStanding.MET: "The job is done in time and within its budget.",
    GoalStanding.MISSED: "The job was not done by its deadline, or ended before it was done.",
}
"""Standing → sentence for users."""


def judged(record: GoalRecord, charge_factor: float, now: float) -> GoalStanding | None:
    """Return the standing of a job; None without goals or without enough data."""
    deadline, forecast = record.goals.deadline, record.forecast
    if deadline is not None and now >= deadline:
        return GoalStanding.MISSED
    standings = [_by_budget(record, charge_factor, now)]
    if deadline is not None and forecast is not None:
        slack = RECOVERY_SLACK if record.standing is GoalStanding.AT_RISK else 0.0
        late = forecast.high > deadline - slack * (deadline - now)
        if record.need is None:
            standings.append(GoalStanding.INFEASIBLE)
        else:
            standings.append(GoalStanding.AT_RISK if late else GoalStanding.ON_TRACK)
    order = (GoalStanding.INFEASIBLE, GoalStanding.AT_RISK, GoalStanding.ON_TRACK)
    return next((each for each in order if each in standings), None)


def _by_budget(record: GoalRecord, charge_factor: float, now: float) -> GoalStanding | None:
    if record.goals.budget_s is None:
        return None
    if record.job.halted:
        return GoalStanding.INFEASIBLE
    required_yield, pace = least_yield(record, charge_factor, now), record.pace
    if required_yield is None or pace is None:
        return None
    best = record.curve.best_rate_per_node * pace
    if best < required_yield:
        return GoalStanding.INFEASIBLE
    return GoalStanding.AT_RISK if best < AT_RISK_FACTOR * required_yield else GoalStanding.ON_TRACK


def more_nodes_help(record: GoalRecord, now: float) -> bool:
    """Return whether more nodes can still save a deadline that is in danger. False if the job has
    as many nodes as it can use, if its largest size is too slow, or if its budget is spent.
    """
    deadline, sizes = record.goals.deadline, record.sizes()
    in_danger = record.standing in (GoalStanding.AT_RISK, GoalStanding.INFEASIBLE)
    if deadline is None or now >= deadline or not in_danger or record.job.halted or not sizes:
        return False
    if len(record.job.nodes) >= sizes[-1]:
        return False
    remaining_work, rates = record.remaining_work, record.rates()
    return (
        remaining_work is None
        or rates is None
        or remaining_work <= float(max(rates)) * (deadline - now)
    )


def least_yield(record: GoalRecord, charge_factor: float, now: float) -> float | None:
    """Return the minimum samples per node-second with which the budget suffices; None if not
    known.
    """
    remaining_work, budget_s = record.remaining_work, record.goals.budget_s
    if remaining_work is None or budget_s is None or charge_factor <= 0:
        return None
    seconds = (budget_s - record.account.charged(now)) / charge_factor
    return remaining_work / seconds if seconds > 0 else math.inf


ASSUMED_PACE = 0.85
"""Assumed pace of a job until it is measured."""
USEFUL_RATE_FRACTION = 0.8
"""Minimum throughput per node of useful nodes, relative to the best throughput per node."""
ASSUMED_PACE_WEIGHT_S = 1200.0
"""Seconds of measured work that weigh as much as :data:`ASSUMED_PACE`."""


@dataclass
class GoalRecord:
    """One job with goals, or whose work is known."""

    job: JobRecord
    goals: OwnerGoals
    account: JobAccount
    exponent: float
    """Assumed scaling of an unmeasured job: nodes**exponent."""
    done: float
    """Processed samples at the last report."""
    at: float
    """Time of the last update."""
    charged_until: float | None = None
    """Time up to which it was charged before the controller was created; None if it never was."""
    node_count: int = 0
    """Number of nodes since the last update."""
    charged_for: tuple[str, ...] | None = None
    """Nodes in its account; None if they must be checked again."""
    measured: bool = False
    """Whether it has a scaling curve."""
    expected: float = 0.0
    """Samples predicted by its curve for the nodes that it held."""
    busy_s: float = 0.0
    """Time with nodes, seconds."""
    seen: float = 0.0
    """Samples reported in the same time."""
    counted: float = 0.0
    """``expected`` up to the last report."""
    counted_s: float = 0.0
    """``busy_s`` up to the last report."""
    share: float | None = None
    """Moving average of its fraction of the nodes; None if it has had no nodes yet."""
    standing: GoalStanding | None = None
    forecast: Forecast | None = None
    need: Need | None = None
    """Need of its deadline; None if it has no deadline or cannot meet it."""
    node_s: float = 0.0
    """Remaining node-seconds at the size that it needs."""
    admitted: bool = False
    """Whether its deadline is admitted (:mod:`malletrain.core.forecast`)."""
    before: int = 0
    """Number of admitted deadlines that are served earlier."""
    review_at: float = -math.inf
    """Time of the next review of its standing."""

    @property
    def remaining_work(self) -> float | None:
        """Remaining samples; None if not known."""
        return None if self.goals.work is None else max(0.0, self.goals.work - self.done)

    @property
    def curve(self) -> ScalingCurve:
        """Its scaling curve, or the neutral prior of one sample/s on one node."""
        spec = self.job.submitted
        return self.job.curve or _neutral(spec.max_nodes, self.exponent)

    @property
    def pace(self) -> float | None:
        """The fraction of :attr:`curve` that it achieves; None without data."""
        measured_pace = self.seen / self.counted if self.counted > 0 else None
        if self.job.curve is None:
            return measured_pace or None
        if measured_pace is None:
            return ASSUMED_PACE
        weight = self.counted_s / (ASSUMED_PACE_WEIGHT_S + self.counted_s)
        return max(0.05, ASSUMED_PACE + weight * (min(measured_pace, 1.5) - ASSUMED_PACE))

    @property
    def bid_curve(self) -> ScalingCurve | None:
        """Curve of its bids; None without data."""
        if self.job.curve is not None:
            return self.job.curve
        pace = self.pace
        return None if pace is None else _scaled(self.curve, rounded(pace))

    def rates(self) -> Floats | None:
        """Return the real throughput at 0, 1, 2, … nodes, samples/s; None without data."""
        pace = self.pace
        if pace is None:
            return None
        spec = self.job.submitted
        return pace * _rates(self.curve, spec.min_nodes, spec.max_nodes, self.job.sizes)

    def sizes(self) -> list[int]:
        """Return its allowed sizes, ascending."""
        spec = self.job.submitted
        allowed = self.job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        return sorted(k for k in allowed if spec.min_nodes <= k <= spec.max_nodes)

    def useful(self) -> int:
        """Return the maximum number of useful nodes (see :data:`USEFUL_RATE_FRACTION`)."""
        sizes = self.sizes()
        min_rate_per_node = USEFUL_RATE_FRACTION * self.curve.best_rate_per_node
        return next(
            (k for k in reversed(sizes) if self.curve.at(k) >= min_rate_per_node * k), sizes[0]
        )

    # --- counting ---

    def advance(self, now: float) -> None:
        """Add the predicted samples since the last update."""
        seconds = max(0.0, now - self.at)
        if self.measured != (self.job.curve is not None):
            # The curve has another unit now, so earlier predictions cannot be compared.
            self.measured = self.job.curve is not None
            self.expected = self.counted = self.seen = self.busy_s = self.counted_s = 0.0
        if self.node_count:
            self.expected += self.curve.at(self.node_count) * seconds
            self.busy_s += seconds
        self.at, self.node_count = now, len(self.job.nodes)

    def report(self, done: float, now: float) -> None:
        """Record the number of processed samples."""
        self.advance(now)
        self.seen += done - self.done
        self.counted, self.counted_s, self.done = self.expected, self.busy_s, done


@lru_cache(maxsize=256)
def _neutral(largest: int, exponent: float) -> ScalingCurve:
    return neutral_curve(largest, exponent, 1.0)


@lru_cache(maxsize=1024)
def _scaled(curve: ScalingCurve, factor: float) -> ScalingCurve:
    return ScalingCurve(tuple((nodes, factor * rate) for nodes, rate in curve.points))


@lru_cache(maxsize=1024)
def _rates(curve: ScalingCurve, low: int, high: int, sizes: tuple[int, ...] | None) -> Floats:
    """Return samples/s by number of available nodes 0 … ``high``, at the best size that they
    allow.
    """
    all_sizes = np.arange(high + 1)
    usable: npt.NDArray[np.bool_] = all_sizes >= low
    if sizes is not None:
        usable &= np.isin(all_sizes, sizes)
    best_rates: Floats = np.maximum.accumulate(np.where(usable, curve.rates(all_sizes), 0.0))
    best_rates.flags.writeable = False
    return best_rates
