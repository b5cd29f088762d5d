"""An upper bound on the throughput of any plan at one moment, with which results are compared: the
largest sum of throughputs that the admitted jobs can reach on the idle nodes if rescaling is free.

The bound of a policy is the integral over the jobs that this policy has admitted at each moment. It
decides nothing in the simulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from malletrain.sim.workloads import SimJob

Floats = npt.NDArray[np.float64]


class IdealThroughput:
    """Ideal throughput by number of idle nodes, for any set of jobs. Tables are cached.

    Args:
        nodes: number of nodes of the machine.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._rows: list[Floats] = []
        self._kinds: dict[Hashable, int] = {}
        self._table = lru_cache(maxsize=4096)(self._make)

    def kind(self, job: SimJob) -> int:
        """Return a number for the job, equal for all jobs with equal sizes and throughputs."""
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
        """Return the ideal throughput of jobs of these kinds, samples/s, at 0, 1, … idle nodes. The
        last value applies to all larger numbers.
        """
        return self._table(tuple(sorted(kinds)))

    def _make(self, kinds: tuple[int, ...]) -> Floats:
        # ``kinds`` is sorted, so that sets of jobs share the tables of their common prefix.
        if not kinds:
            return np.zeros(1)
        before, row = self._table(kinds[:-1]), self._rows[kinds[-1]]
        size = min(len(before) + len(row) - 1, self._nodes + 1)
        # best[n] = max over k of before[n - k] + row[k]: one window of ``before`` for each n.
        padded = np.concatenate(
            [np.full(len(row) - 1, -np.inf), before, np.full(size - len(before), before[-1])]
        )
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(row))[:size]
        return np.asarray((windows + row[::-1]).max(axis=1))
