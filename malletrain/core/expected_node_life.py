"""Forecasts how long a job can keep its nodes, for its bid. Pure.

Decides the order in which a job is assumed to get nodes: first its own, the longest-lasting first;
then free ones; then those of other jobs, which give up the ones that end first.
:mod:`scavenger.lifetimes` forecasts the lifetime of each node, and :mod:`allocator.valuation`
values it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator import Cohort, LossForecast, NodeInfo, mean_survival_s, survival_matrix

Counts = npt.NDArray[np.int64]
"""Integers: numbers of nodes, or ranks of cohorts, the longest-lasting first."""
_COHORT = attrgetter("cohort")
_CLASS = attrgetter("node_class")
_KIND = attrgetter("node_class", "cohort")


def cohorts(
    forecasts: Mapping[str, tuple[float, tuple[tuple[float, ...], tuple[float, ...]]]],
) -> dict[str, tuple[float, Cohort]]:
    """Return node → (expected seconds, cohort) from node → (expected seconds, (times, survival)).
    Nodes with the same forecast object are one cohort.
    """
    cohort_of_object: dict[int, Cohort] = {}
    cohort_of = {}
    for node, (remaining_s, curve) in forecasts.items():
        if id(curve) not in cohort_of_object:
            cohort_of_object[id(curve)] = Cohort(*curve)
        cohort_of[node] = (remaining_s, cohort_of_object[id(curve)])
    return cohort_of


class ExpectedNodeLife:
    """Forecasts for the nodes of one plan.

    Args:
        nodes: nodes of the plan, with their pool as their class.
        nodes_of_jobs: nodes of each job, by the job's number.
        window_s: time that bids look ahead, seconds.
        work_s: work lost with a node, in seconds of the job's throughput.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeInfo],
        nodes_of_jobs: Sequence[Collection[str]],
        window_s: float,
        work_s: float,
    ) -> None:
        self._window_s = window_s
        self._work_s = work_s
        infos = nodes.values()
        pools = list(dict.fromkeys(map(_CLASS, infos)))
        self._pools = {pool: number for number, pool in enumerate(pools)}
        kinds = Counter(map(_COHORT, infos) if len(pools) == 1 else map(_KIND, infos))
        all_cohorts = list(kinds) if len(pools) == 1 else list(dict.fromkeys(c for _, c in kinds))
        rows = survival_matrix(all_cohorts, window_s)
        # A node without a forecast is assumed to outlast all others.
        unknown = np.array([cohort is None for cohort in all_cohorts], dtype=bool)
        left_s = np.where(unknown, 2.0 * window_s, mean_survival_s(rows, window_s))
        longest = np.argsort(-left_s, kind="stable")
        self._rows = rows[longest]
        places: dict[Any, int] = {
            all_cohorts[at]: place for place, at in enumerate(longest.tolist())
        }
        if len(pools) > 1:
            places = {
                (pool, cohort): number * len(all_cohorts) + place
                for pool, number in self._pools.items()
                for cohort, place in places.items()
            }
        counts = np.zeros(len(pools) * len(all_cohorts), np.int64)
        counts[[places[kind] for kind in kinds]] = list(kinds.values())
        # One key for each (pool, job, cohort), with its number of nodes.
        nodes_in_use = map(nodes.__getitem__, chain.from_iterable(nodes_of_jobs))
        sizes = np.array([len(names) for names in nodes_of_jobs], dtype=np.int64)
        kind_of = map(_COHORT if len(pools) == 1 else _KIND, nodes_in_use)
        at = np.fromiter(map(places.__getitem__, kind_of), np.int64, int(sizes.sum()))
        pool_of, cohort_of = np.divmod(at, max(1, len(all_cohorts)))
        keys = (pool_of * len(nodes_of_jobs) + np.arange(len(nodes_of_jobs)).repeat(sizes)) * len(
            all_cohorts
        ) + cohort_of
        self._keys, self._own_counts = np.unique(keys, return_counts=True)
        shape = len(pools), len(all_cohorts)
        in_use = np.bincount(at, minlength=len(counts))
        self._taken, self._free = in_use.reshape(shape), (counts - in_use).reshape(shape)
        self._shape = len(nodes_of_jobs), len(all_cohorts)

    def in_pool(
        self, pool: str, jobs: Sequence[int], max_nodes: Sequence[int]
    ) -> list[LossForecast]:
        """Return the loss forecast of each of these jobs in one pool.

        Args:
            pool: name of the pool.
            jobs: numbers of the jobs, ascending.
            max_nodes: maximum number of nodes of each of these jobs.
        """
        number = self._pools.get(pool)
        if number is None:
            return [LossForecast([], self._window_s, self._work_s) for _ in jobs]
        job, cohort, count = self._own_nodes(number, jobs)
        own_nodes = np.bincount(job, count, len(jobs)).astype(np.int64)
        room = np.array(max_nodes, dtype=np.int64) - own_nodes
        max_room = max(0, int(room.max(initial=0)))
        free, in_use = self._free[number], self._taken[number]
        first = _first(free, free.nonzero()[0], max_room)
        last = _first(in_use, in_use.nonzero()[0][::-1], max_room + int(own_nodes.max(initial=0)))
        # The other jobs' nodes are those of all jobs without the job's own.
        place = np.full(len(in_use), -1)
        place[last] = np.arange(len(last))
        others = np.tile(in_use[last], (len(jobs), 1))
        has_place = place[cohort] >= 0
        others[job[has_place], place[cohort[has_place]]] -= count[has_place]
        offered = np.hstack((np.tile(free[first], (len(jobs), 1)), others))
        before = offered.cumsum(axis=1) - offered
        obtained = np.minimum(offered, room[:, None] - before).clip(0)
        more_job, at = obtained.nonzero()
        job = np.concatenate((job, more_job))
        order = np.argsort(job, kind="stable")
        rows = self._rows[np.concatenate((cohort, np.concatenate((first, last))[at]))[order]]
        counts = np.concatenate((count, obtained[more_job, at]))[order].astype(np.float64)
        ends = np.bincount(job, minlength=len(jobs)).cumsum().tolist()
        return [
            LossForecast.from_arrays(rows[a:b], counts[a:b], self._window_s, self._work_s)
            for a, b in pairwise([0, *ends])
        ]

    def _own_nodes(self, pool: int, jobs: Sequence[int]) -> tuple[Counts, Counts, Counts]:
        """Return the nodes of these jobs in one pool as three arrays: position in ``jobs``, cohort,
        number of nodes. One entry per job and cohort.
        """
        job_count, cohorts = self._shape
        low, high = self._keys.searchsorted(
            (pool * job_count * cohorts, (pool + 1) * job_count * cohorts)
        )
        job, cohort = np.divmod(self._keys[low:high] - pool * job_count * cohorts, cohorts)
        count = self._own_counts[low:high]
        if len(jobs) < job_count:
            place = np.full(job_count, -1)
            place[list(jobs)] = np.arange(len(jobs))
            job = place[job]
            job, cohort, count = job[job >= 0], cohort[job >= 0], count[job >= 0]
        return job, cohort, count


def _first(counts: Counts, places: Counts, nodes: int) -> Counts:
    """Return the first of ``places`` that together have at least ``nodes`` nodes."""
    return places[: int(counts[places].cumsum().searchsorted(nodes)) + 1]
