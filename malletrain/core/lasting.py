"""From what is foretold of the nodes to what a job's bid may expect of them. Pure.

Decides in which order a job is taken to have nodes: its own, those that last longest first, then
those that nobody has, then those of other jobs, which give up the ones that end first. How long
each lasts is foretold elsewhere (:mod:`scavenger.lifetimes`); what that is worth is the bid's
(:mod:`allocator.objectives`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from operator import add, attrgetter

import numpy as np
import numpy.typing as npt

from allocator import Cohort, NodeInfo, Outlook, expected_s, survivals

Counts = npt.NDArray[np.int64]
"""How many nodes there are of each cohort, those that last longest first."""
_COHORT = attrgetter("cohort")
_CLASS = attrgetter("node_class")


def cohorts(
    told: Mapping[str, tuple[float, tuple[tuple[float, ...], tuple[float, ...]]]],
) -> dict[str, tuple[float, Cohort]]:
    """Node → (expected seconds, cohort), of node → (expected seconds, (times, survival)). Nodes of
    which the very same is told are one cohort.
    """
    made: dict[int, Cohort] = {}
    found = {}
    for node, (left, together) in told.items():
        if id(together) not in made:
            made[id(together)] = Cohort(*together)
        found[node] = (left, made[id(together)])
    return found


class Lasting:
    """What is foretold of the nodes of one plan.

    Args:
        nodes: those that the plan shares out, their pool as their class.
        held: those of them that some job has.
        window_s: how far bids look ahead, seconds.
        work_s: work that is lost with a node, seconds of the job's throughput.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeInfo],
        held: Collection[str],
        window_s: float,
        work_s: float,
    ) -> None:
        self._window_s = window_s
        self._work_s = work_s
        infos = nodes.values()
        pools = list(dict.fromkeys(map(_CLASS, infos)))
        self._pools = {pool: number for number, pool in enumerate(pools)}
        every = list(dict.fromkeys(map(_COHORT, infos)))
        rows = survivals(every, window_s)
        # A node of which nothing is foretold is taken to outlast all others.
        unknown = np.array([cohort is None for cohort in every], dtype=bool)
        left_s = np.where(unknown, 2.0 * window_s, expected_s(rows, window_s))
        longest = np.argsort(-left_s, kind="stable")
        self._rows = rows[longest]
        self._shape = len(pools), len(every)
        rank = {every[at]: place for place, at in enumerate(longest.tolist())}
        ranks = map(rank.__getitem__, map(_COHORT, infos))
        if len(pools) > 1:
            begins = {pool: number * len(every) for pool, number in self._pools.items()}
            ranks = map(add, ranks, map(begins.__getitem__, map(_CLASS, infos)))
        self._at = dict(zip(nodes, ranks, strict=True))
        """Node → the number of its pool and cohort."""
        counts, self._taken = self._counted(self._at), self._counted(held)
        self._free = counts - self._taken

    def of_job(self, mine: Collection[str], pools: Iterable[str], most: int) -> dict[str, Outlook]:
        """Pool → what a job that holds ``mine`` and may have ``most`` nodes can expect in it."""
        found = {}
        own = self._counted(mine)
        for pool in pools:
            number = self._pools.get(pool)
            if number is None:
                found[pool] = Outlook([], self._window_s, self._work_s)
                continue
            ours = own[number]
            places = ours.nonzero()[0]
            counts = ours[places]
            room = most - int(counts.sum())
            for others, step in ((self._free[number], 1), (self._taken[number] - ours, -1)):
                if room <= 0:
                    break
                more = others.nonzero()[0][::step]
                some = others[more]
                ends = some.cumsum()
                some = np.minimum(some, room - ends + some)[: int(ends.searchsorted(room)) + 1]
                room -= int(some.sum())
                places = np.concatenate((places, more[: len(some)]))
                counts = np.concatenate((counts, some))
            found[pool] = Outlook.from_arrays(
                self._rows[places], counts.astype(np.float64), self._window_s, self._work_s
            )
        return found

    def _counted(self, names: Collection[str]) -> Counts:
        """How many of these nodes are of each pool and cohort."""
        at = np.fromiter(map(self._at.__getitem__, names), np.intp, len(names))
        return np.bincount(at, minlength=math.prod(self._shape)).reshape(self._shape)
