"""Replicas on the gaps of a machine: the useful share of the idle time when models have to be
loaded, and the benefit of a start cost. For :mod:`benchmarks.llm_fair`.

Every idle node is leased, and is available ``lease_s`` after its gap begins. A replica loads its
model and serves until the gap ends; a training starts in ``TRAINING_START_S`` and trains until
then. A node-second of serving is worth ``worth`` times one of training. *Off*: a start costs
nothing in the plan, so that replicas get every node at once. *On*: a node trains until the age of
its gap at which the life table (:mod:`scavenger.horizon`) expects the highest worth of a replica,
with the costs of both starts; that age may be 0, or never.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scavenger.horizon import SurvivalEstimator
from scavenger.trace.trace import Trace

TRAINING_START_S = 18.0
"""Time until a training continues with an additional node, seconds (BFTrainer's data, arXiv
2106.12091).
"""
POLL_S = 30.0
MAX_AGE_S = 7 * 86400.0
DAY_S = 86400.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GapAccount:
    """Results for models with one load time."""

    load_s: float
    allowed: float
    """Part of the idle node time after a load at the beginning of each gap: an upper bound."""
    useful: float
    """Part of the idle node time in which replicas serve, if they get every node."""
    serving_on: float
    """That part with the start cost in the plan."""
    training_on: float
    """Part in which nodes train then."""
    worth_off: float
    """Worth of serving and training, relative to serving all the time, without the start cost."""
    worth_on: float

    @property
    def of_allowed(self) -> float:
        """Useful time as a part of that bound."""
        return self.useful / self.allowed

    @property
    def useful_on(self) -> float:
        """Part of the idle node time in which nodes serve or train with the start cost."""
        return self.serving_on + self.training_on


def lengths(trace: Trace, start_s: float, end_s: float) -> Floats:
    """Return the lengths of the gaps that begin in a time, seconds."""
    gaps = trace.gaps()
    within = (gaps.start >= start_s) & (gaps.start < end_s)
    return np.asarray(gaps.length[within], dtype=np.float64)


def life_table(trace: Trace, end_s: float) -> SurvivalEstimator:
    """Return the life table of the gaps before a time, as the daemon would have it then."""
    table = SurvivalEstimator()
    gaps = trace.gaps()
    order = np.argsort(gaps.end)
    for start, end in zip(gaps.start[order].tolist(), gaps.end[order].tolist(), strict=True):
        if start < end_s:
            table.observe(min(end, end_s) - start, ended=end < end_s)
    return table


def age_of_replicas(table: SurvivalEstimator, load_s: float, worth: float) -> float:
    """Return the age of a gap at which its node becomes a replica, seconds: the one with the
    highest expected worth; infinite if it should always train.
    """

    def expected_after(time_s: float) -> float:
        return table.survival(time_s) * table.expected_remaining(time_s)

    best, best_worth = 0.0, worth * expected_after(load_s)
    age = POLL_S
    while age < MAX_AGE_S:
        trained_s = expected_after(TRAINING_START_S) - expected_after(age)
        age_worth = trained_s + worth * expected_after(age + load_s)
        if age_worth > best_worth:
            best, best_worth = age, age_worth
        age *= 1.05
    return best if best_worth >= expected_after(TRAINING_START_S) else float("inf")


def account(
    idle: Floats, table: SurvivalEstimator, load_s: float, lease_s: float, worth: float
) -> GapAccount:
    """Return the results for gaps.

    Args:
        idle: lengths, seconds.
        table: known distribution of their lengths.
        load_s: time in which a replica loads its model, seconds.
        lease_s: time until a node is available, seconds.
        worth: worth of a node-second of serving, in node-seconds of training.
    """
    total = float(idle.sum())
    leased = np.maximum(0.0, idle - lease_s)
    allowed = float(np.maximum(0.0, idle - load_s).sum()) / total
    useful = float(np.maximum(0.0, leased - load_s).sum()) / total
    age = age_of_replicas(table, load_s, worth)
    trained = np.maximum(0.0, np.minimum(leased, age) - TRAINING_START_S) if age else 0.0 * idle
    serving = float(np.maximum(0.0, leased - age - load_s).sum()) / total
    training = float(trained.sum()) / total
    return GapAccount(
        load_s,
        allowed,
        useful,
        serving,
        training,
        useful,
        serving + training / worth,
    )
