"""How long a job may expect to have nodes, for its bid. Pure.

Decides the order in which a job is assumed to get nodes: first its own, those that last longest
first; then free ones; then those of other jobs, which give up the ones that end first.
:mod:`scavenger.lifetimes` forecasts how long each lasts, and :mod:`allocator.valuation` values it.
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
"""Whole numbers: nodes, or places of cohorts, those that last longest first."""
_COHORT = attrgetter("cohort")
_CLASS = attrgetter("node_class")
_KIND = attrgetter("node_class", "cohort")


def cohorts(
    forecasts: Mapping[str, tuple[float, tuple[tuple[float, ...], tuple[float, ...]]]],
) -> dict[str, tuple[float, Cohort]]:
    """Node → (expected seconds, cohort), of node → (expected seconds, (times, survival)). Nodes of
    which the very same is told are one cohort.
    """
    made: dict[int, Cohort] = {}
    cohort_of = {}
    for node, (remaining_s, together) in forecasts.items():
        if id(together) not in made:
            made[id(together)] = Cohort(*together)
        cohort_of[node] = (remaining_s, made[id(together)])
    return cohort_of


class ExpectedNodeLife:
    """What is foretold of the nodes of one plan.

    Args:
        nodes: those that the plan shares out, their pool as their class.
        nodes_of_jobs: those of them that each job has, one after the other.
        window_s: how far bids look ahead, seconds.
        work_s: work that is lost with a node, seconds of the job's throughput.
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
        every = list(kinds) if len(pools) == 1 else list(dict.fromkeys(c for _, c in kinds))
        rows = survival_matrix(every, window_s)
        # A node of which nothing is foretold is taken to outlast all others.
        unknown = np.array([cohort is None for cohort in every], dtype=bool)
        left_s = np.where(unknown, 2.0 * window_s, mean_survival_s(rows, window_s))
        longest = np.argsort(-left_s, kind="stable")
        self._rows = rows[longest]
        places: dict[Any, int] = {every[at]: place for place, at in enumerate(longest.tolist())}
        if len(pools) > 1:
            places = {
                (pool, cohort): number * len(every) + place
                for pool, number in self._pools.items()
                for cohort, place in places.items()
            }
        counts = np.zeros(len(pools) * len(every), np.int64)
        counts[[places[kind] for kind in kinds]] = list(kinds.values())
        # A number each pool, job and cohort, in this order; how many nodes there are of each.
        mine = map(nodes.__getitem__, chain.from_iterable(nodes_of_jobs))
        sizes = np.array([len(names) for names in nodes_of_jobs], dtype=np.int64)
        kind_of = map(_COHORT if len(pools) == 1 else _KIND, mine)
        at = np.fromiter(map(places.__getitem__, kind_of), np.int64, int(sizes.sum()))
        pool_of, cohort_of = np.divmod(at, max(1, len(every)))
        keys = (pool_of * len(nodes_of_jobs) + np.arange(len(nodes_of_jobs)).repeat(sizes)) * len(
            every
        ) + cohort_of
        self._keys, self._own_counts = np.unique(keys, return_counts=True)
        shape = len(pools), len(every)
        taken = np.bincount(at, minlength=len(counts))
        self._taken, self._free = taken.reshape(shape), (counts - taken).reshape(shape)
        self._shape = len(nodes_of_jobs), len(every)

    def in_pool(self, pool: str, jobs: Sequence[int], most: Sequence[int]) -> list[LossForecast]:
        """What each of these jobs (their numbers, ascending), which may have ``most`` nodes, can
        expect in one pool.
        """
        number = self._pools.get(pool)
        if number is None:
            return [LossForecast([], self._window_s, self._work_s) for _ in jobs]
        job, cohort, count = self._of(number, jobs)
        own_nodes = np.bincount(job, count, len(jobs)).astype(np.int64)
        room = np.array(most, dtype=np.int64) - own_nodes
        widest = max(0, int(room.max(initial=0)))
        free, taken = self._free[number], self._taken[number]
        first = _first(free, free.nonzero()[0], widest)
        last = _first(taken, taken.nonzero()[0][::-1], widest + int(own_nodes.max(initial=0)))
        # Those of the others are all that jobs have but for the job's own.
        place = np.full(len(taken), -1)
        place[last] = np.arange(len(last))
        others = np.tile(taken[last], (len(jobs), 1))
        ours = place[cohort] >= 0
        others[job[ours], place[cohort[ours]]] -= count[ours]
        offered = np.hstack((np.tile(free[first], (len(jobs), 1)), others))
        before = offered.cumsum(axis=1) - offered
        some = np.minimum(offered, room[:, None] - before).clip(0)
        more_job, at = some.nonzero()
        job = np.concatenate((job, more_job))
        order = np.argsort(job, kind="stable")
        rows = self._rows[np.concatenate((cohort, np.concatenate((first, last))[at]))[order]]
        counts = np.concatenate((count, some[more_job, at]))[order].astype(np.float64)
        ends = np.bincount(job, minlength=len(jobs)).cumsum().tolist()
        return [
            LossForecast.from_arrays(rows[a:b], counts[a:b], self._window_s, self._work_s)
            for a, b in pairwise([0, *ends])
        ]

    def _of(self, pool: int, jobs: Sequence[int]) -> tuple[Counts, Counts, Counts]:
        """What these jobs have in one pool: place in ``jobs``, cohort and number of nodes, by job
        and cohort.
        """
        every, cohorts = self._shape
        low, high = self._keys.searchsorted((pool * every * cohorts, (pool + 1) * every * cohorts))
        job, cohort = np.divmod(self._keys[low:high] - pool * every * cohorts, cohorts)
        count = self._own_counts[low:high]
        if len(jobs) < every:
            place = np.full(every, -1)
            place[list(jobs)] = np.arange(len(jobs))
            job = place[job]
            job, cohort, count = job[job >= 0], cohort[job >= 0], count[job >= 0]
        return job, cohort, count


def _first(counts: Counts, places: Counts, nodes: int) -> Counts:
    """As many of ``places`` as have so many nodes together."""
    return places[: int(counts[places].cumsum().searchsorted(nodes)) + 1]
