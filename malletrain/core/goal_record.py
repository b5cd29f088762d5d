"""What is known of a job with goals or known work: its real speed and the remaining work.

Decides how predicted and real speed are combined: the *pace* is the fraction of its curve that a
job achieves on the nodes it holds. Pauses, lost work and errors of the curve are all included.
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

USUAL_PACE = 0.85
"""The pace of a job until it was seen."""
USEFUL = 0.8
"""Nodes are of good use where each brings so much of the most that one can bring."""
KNOWN_AFTER_S = 1200.0
"""So many seconds of work count as much as that."""


@dataclass
class GoalRecord:
    """One job with goals, or whose work is known."""

    job: JobRecord
    goals: OwnerGoals
    account: JobAccount
    exponent: float
    """An unmeasured job is taken to speed up as nodes**exponent."""
    done: float
    """Samples so far, as far as was reported."""
    at: float
    """When it was looked at last."""
    charged_until: float | None = None
    """Up to when it was charged before the controller was made."""
    node_count: int = 0
    """Nodes since then."""
    charged_for: tuple[str, ...] | None = None
    """The nodes that its account has, as the controller had them; None: look anew."""
    measured: bool = False
    """Whether it is known how it scales."""
    expected: float = 0.0
    """What its curve made of the nodes it held, samples."""
    busy_s: float = 0.0
    """How long it held any."""
    seen: float = 0.0
    """Samples that it was seen to do meanwhile."""
    counted: float = 0.0
    """``expected`` up to the last report."""
    counted_s: float = 0.0
    """``busy_s`` up to the last report."""
    share: float | None = None
    """The part of the nodes there are that it had of late; None: it had no turn yet."""
    standing: GoalStanding | None = None
    forecast: Forecast | None = None
    need: Need | None = None
    """What its deadline needs; None: it has none, or it cannot be held."""
    node_s: float = 0.0
    """Node-seconds until it is done, at the size that it needs."""
    admitted: bool = False
    """Whether its deadline is admitted (:mod:`malletrain.core.deadline_admission`)."""
    before: int = 0
    """Number of admitted deadlines that are served before it."""
    review_at: float = -math.inf
    """When it is looked how it stands."""

    @property
    def remaining_work(self) -> float | None:
        """Samples left; None: not known."""
        return None if self.goals.work is None else max(0.0, self.goals.work - self.done)

    @property
    def curve(self) -> ScalingCurve:
        """What is known of its speed, else the neutral prior of one sample a second."""
        spec = self.job.submitted
        return self.job.curve or _neutral(spec.max_nodes, self.exponent)

    @property
    def pace(self) -> float | None:
        """The part of :attr:`curve` that it gets done; None: nothing is known of its speed."""
        seen = self.seen / self.counted if self.counted > 0 else None
        if self.job.curve is None:
            return seen or None
        if seen is None:
            return USUAL_PACE
        weight = self.counted_s / (KNOWN_AFTER_S + self.counted_s)
        return max(0.05, USUAL_PACE + weight * (min(seen, 1.5) - USUAL_PACE))

    @property
    def bid_curve(self) -> ScalingCurve | None:
        """What its bids are made from; None: nothing is known of its speed."""
        if self.job.curve is not None:
            return self.job.curve
        pace = self.pace
        return None if pace is None else _times(self.curve, rounded(pace))

    def rates(self) -> Floats | None:
        """What it gets done at 0, 1, 2, … nodes, samples/s; None: nothing is known of its speed."""
        pace = self.pace
        if pace is None:
            return None
        spec = self.job.submitted
        return pace * _rates(self.curve, spec.min_nodes, spec.max_nodes, self.job.sizes)

    def sizes(self) -> list[int]:
        """The sizes it may have, ascending."""
        spec = self.job.submitted
        allowed = self.job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        return sorted(k for k in allowed if spec.min_nodes <= k <= spec.max_nodes)

    def useful(self) -> int:
        """The most nodes that bring nearly as much each as any do."""
        sizes = self.sizes()
        least = USEFUL * self.curve.best_rate_per_node
        return next((k for k in reversed(sizes) if self.curve.at(k) >= least * k), sizes[0])

    # --- counting ---

    def look(self, now: float) -> None:
        """Count what was to be expected of it since the last look."""
        seconds = max(0.0, now - self.at)
        if self.measured != (self.job.curve is not None):
            # Of another unit: what was expected before is not to be compared.
            self.measured = self.job.curve is not None
            self.expected = self.counted = self.seen = self.busy_s = self.counted_s = 0.0
        if self.node_count:
            self.expected += self.curve.at(self.node_count) * seconds
            self.busy_s += seconds
        self.at, self.node_count = now, len(self.job.nodes)

    def report(self, done: float, now: float) -> None:
        """So many samples are done."""
        self.look(now)
        self.seen += done - self.done
        self.counted, self.counted_s, self.done = self.expected, self.busy_s, done


@lru_cache(maxsize=256)
def _neutral(largest: int, exponent: float) -> ScalingCurve:
    return neutral_curve(largest, exponent, 1.0)


@lru_cache(maxsize=1024)
def _times(curve: ScalingCurve, factor: float) -> ScalingCurve:
    return ScalingCurve(tuple((nodes, factor * rate) for nodes, rate in curve.points))


@lru_cache(maxsize=1024)
def _rates(curve: ScalingCurve, low: int, high: int, sizes: tuple[int, ...] | None) -> Floats:
    """Samples/s with so many nodes to choose from: at the best size that they allow."""
    every = np.arange(high + 1)
    usable: npt.NDArray[np.bool_] = every >= low
    if sizes is not None:
        usable &= np.isin(every, sizes)
    best_rates: Floats = np.maximum.accumulate(np.where(usable, curve.rates(every), 0.0))
    best_rates.flags.writeable = False
    return best_rates
