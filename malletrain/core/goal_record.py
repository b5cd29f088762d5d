"""Tracks a job with goals or known work: its real throughput and its remaining work.

Decides how predicted and real throughput are combined. The *pace* is the fraction of its curve that
a job achieves on its nodes. It includes pauses, lost work and errors of the curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from allocator import ScalingCurve
from malletrain.core.forecast import Floats, Forecast
from malletrain.core.goal_bids import Need, rounded
from malletrain.core.goals import GoalStanding, OwnerGoals
from malletrain.core.ledger import JobAccount
from malletrain.core.planning import neutral_curve
from malletrain.core.records import JobRecord

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
    """Whether its deadline is admitted (:mod:`malletrain.core.deadline_admission`)."""
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

    def look(self, now: float) -> None:
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
        self.look(now)
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
