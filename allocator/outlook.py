"""What is to be expected of nodes that may go: how long a job of each size is left alone, and what
is left of it afterwards.

Decides nothing and knows nothing of how the expectations came about. Nodes that are expected to
end together form a *cohort*; a job is hit when the first of its cohorts ends. Cohorts are taken to
end independently of each other, the nodes of one all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cohort:
    """Nodes that are expected to end together, and when."""

    times_s: tuple[float, ...]
    """Seconds from now, increasing, the first 0."""
    survival: tuple[float, ...]
    """The probability that they are there still at each of these times; the first 1."""

    def expected_s(self, window_s: float) -> float:
        """How long they are there within the window, seconds, expected."""
        grid = _grid(window_s)
        left = self.at(grid)
        return float(0.5 * (left[:-1] + left[1:]) @ np.diff(grid))

    def at(self, grid: Floats) -> Floats:
        """The survival at other times, seconds; held after the last one known."""
        return np.asarray(np.interp(grid, self.times_s, self.survival))


class Outlook:
    """What a job may expect within ``window_s`` seconds, by the number of nodes it has.

    Args:
        cohorts: (cohort, nodes in it) in the order in which the job would have them: its own first,
            those that last longest before the others. A node of no cohort is taken to stay.
        window_s: how far to look ahead, seconds.
        work_s: work that is lost with a node that goes, seconds of the job's throughput.
    """

    def __init__(
        self, cohorts: Sequence[tuple[Cohort | None, int]], window_s: float, work_s: float
    ) -> None:
        self.window_s = window_s
        self.work_s = work_s
        grid = _grid(window_s)
        rows = np.array([np.ones(len(grid)) if c is None else c.at(grid) for c, _ in cohorts])
        counts = np.array([count for _, count in cohorts], dtype=np.float64)
        alone = np.cumprod(rows.reshape(len(cohorts), len(grid)), axis=0)
        self._ends = np.cumsum(counts)
        self._kept = 0.5 * (alone[:, :-1] + alone[:, 1:]) @ np.diff(grid)
        self._hit = 1.0 - alone[:, -1]
        self._first = 1.0 - rows[:, -1] if len(rows) else np.zeros(0)
        self._weighed = np.cumsum(self._first)
        self._lost = np.cumsum(self._first * counts)

    def of(self, sizes: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """For each of ``sizes``: the seconds for which a job of that size is left alone, at most
        the window; the probability that it is hit within the window; the nodes it has then.

        Sizes beyond the last node known are as those of all nodes known.
        """
        wanted = sizes.astype(np.float64)
        if not len(self._ends):
            return np.full(len(sizes), self.window_s), np.zeros(len(sizes)), wanted
        k = np.minimum(np.searchsorted(self._ends, wanted), len(self._ends) - 1)
        before = np.where(k > 0, self._ends[k - 1], 0.0)
        lost = np.where(k > 0, self._lost[k - 1], 0.0) + self._first[k] * (wanted - before)
        share = np.divide(
            lost, self._weighed[k], out=np.zeros(len(sizes)), where=self._weighed[k] > 1e-12
        )
        return self._kept[k], self._hit[k], np.maximum(wanted - share, 0.0)


def _grid(window_s: float) -> Floats:
    return np.asarray(window_s * np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0]))
