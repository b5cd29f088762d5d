"""What is to be expected of nodes that may go: how long a job of each size is left alone, and what
is left of it afterwards.

Decides nothing and knows nothing of how the expectations came about. Nodes that are expected to
end together form a *cohort*; a job is hit when the first of its cohorts ends. Cohorts are taken to
end independently of each other, the nodes of one all at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_SHARES = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0])
"""Of the window: where the survival is looked at."""
_STEPS = np.diff(_SHARES)
_MEAN = 0.5 * (np.append(_STEPS, 0.0) + np.append(0.0, _STEPS))
"""Weights of the trapezoidal rule over the window."""
_STAYS = np.ones(len(_SHARES))


@dataclass(frozen=True, eq=False)
class Cohort:
    """Nodes that are expected to end together, and when."""

    times_s: tuple[float, ...]
    """Seconds from now, increasing, the first 0."""
    survival: tuple[float, ...]
    """The probability that they are there still at each of these times; the first 1."""

    def expected_s(self, window_s: float) -> float:
        """How long they are there within the window, seconds, expected."""
        return window_s * float(_within(self, window_s) @ _MEAN)


@lru_cache(maxsize=8192)
def _within(cohort: Cohort, window_s: float) -> Floats:
    """The survival over the window; held after the last time known."""
    return np.asarray(np.interp(window_s * _SHARES, cohort.times_s, cohort.survival))


@lru_cache(maxsize=8192)
def _stays(cohort: Cohort, window_s: float) -> float:
    """The probability that its nodes are there still after so many seconds."""
    return float(_within(cohort, window_s)[-1])


class Outlook:
    """What a job may expect within ``window_s`` seconds, by the number of nodes it has.

    Args:
        cohorts: (cohort, nodes in it) in the order in which the job would have them: its own first,
            those that last longest before the others. A node of no cohort is taken to stay.
        window_s: how far to look ahead, seconds.
        work_s: work that is lost with a node that goes, seconds of the job's throughput.
    """

    __slots__ = ("_cohorts", "window_s", "work_s")

    def __init__(
        self, cohorts: Sequence[tuple[Cohort | None, int]], window_s: float, work_s: float
    ) -> None:
        self._cohorts = cohorts
        self.window_s = window_s
        self.work_s = work_s

    def hit(self) -> float:
        """The probability that a job with all these nodes is hit within the window."""
        window_s = self.window_s
        return 1.0 - math.prod(_stays(c, window_s) for c, _ in self._cohorts if c is not None)

    def of(self, sizes: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """For each of ``sizes``: the seconds for which a job of that size is left alone, at most
        the window; the probability that it is hit within the window; the nodes it has then.

        Sizes beyond the last node known are as those of all nodes known.
        """
        wanted = sizes.astype(np.float64)
        if not self._cohorts:
            return np.full(len(sizes), self.window_s), np.zeros(len(sizes)), wanted
        window_s = self.window_s
        each = [_STAYS if c is None else _within(c, window_s) for c, _ in self._cohorts]
        rows = np.concatenate(each).reshape(len(each), len(_SHARES))
        counts = np.array([count for _, count in self._cohorts], dtype=np.float64)
        ends = counts.cumsum()
        k = np.minimum(ends.searchsorted(wanted), len(ends) - 1)
        alone = rows.cumprod(axis=0)
        goes = 1.0 - rows[:, -1]
        # Of the cohorts that may go, each is the one that goes by its share of the odds.
        odds = goes.cumsum()
        lost = (goes * counts).cumsum()[k] - goes[k] * (ends[k] - wanted)
        left = wanted - lost / np.maximum(odds[k], 1e-12)
        return (
            window_s * (alone @ _MEAN)[k],
            (1.0 - alone[:, -1])[k],
            np.where(odds[k] > 1e-12, np.maximum(left, 0.0), wanted),
        )
