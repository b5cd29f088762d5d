"""The upper bound that every simulated number is quoted against: what the jobs of the moment could
do if rescaling were free.

At every instant: the largest sum of throughputs that the jobs that are admitted can reach on the
nodes that are idle. No plan processes more at that instant, so the integral bounds every
policy on the same jobs; a policy that finishes jobs sooner is measured against the jobs that are
there then. Decides nothing in the simulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from malletrain.sim.workloads import SimJob

Floats = npt.NDArray[np.float64]


class Bound:
    """Best total throughput by number of idle nodes, for any set of jobs. Tables of sets met before
    are kept.

    Args:
        nodes: all nodes of the machine.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._rows: list[Floats] = []
        self._kinds: dict[Hashable, int] = {}
        self._table = lru_cache(maxsize=4096)(self._make)

    def kind(self, job: SimJob) -> int:
        """A number that is the same for jobs with the same sizes and throughputs."""
        key = (job.curve, job.min_nodes, job.max_nodes, job.sizes)
        if key not in self._kinds:
            rates = np.array(job.rates()[: self._nodes + 1])
            allowed = np.zeros(len(rates), np.bool_)
            allowed[job.min_nodes :] = True
            if job.sizes is not None:
                allowed &= np.isin(np.arange(len(rates)), job.sizes)
            allowed[0] = True
            self._kinds[key] = len(self._rows)
            self._rows.append(np.where(allowed, rates, -np.inf))
        return self._kinds[key]

    def table(self, kinds: Iterable[int]) -> Floats:
        """Samples/s at 0, 1, … idle nodes; beyond the end of the table the last value holds."""
        return self._table(tuple(sorted(kinds)))

    def _make(self, kinds: tuple[int, ...]) -> Floats:
        # Sorted, so that sets that differ in a few jobs share the tables of what they have in
        # common at the beginning.
        if not kinds:
            return np.zeros(1)
        before, row = self._table(kinds[:-1]), self._rows[kinds[-1]]
        size = min(len(before) + len(row) - 1, self._nodes + 1)
        # best[n] = max over k of before[n - k] + row[k], all n at once: a window of `before` for
        # each n.
        padded = np.concatenate(
            [np.full(len(row) - 1, -np.inf), before, np.full(size - len(before), before[-1])]
        )
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(row))[:size]
        return np.asarray((windows + row[::-1]).max(axis=1))
