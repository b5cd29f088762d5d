"""From what is foretold of the nodes to what a job's bid may expect of them. Pure.

Decides in which order a job is taken to have nodes: its own, those that last longest first, then
those that nobody has, then those of other jobs, which give up the ones that end first. How long
each lasts is foretold elsewhere (:mod:`scavenger.lifetimes`); what that is worth is the bid's
(:mod:`allocator.objectives`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from allocator import Cohort, NodeInfo, Outlook

Counted = list[tuple[Cohort | None, int]]
_COHORT = attrgetter("cohort")
_WHICH = attrgetter("node_class", "cohort")


def counted(infos: Iterable[NodeInfo]) -> Counted:
    """How many of these nodes are of each cohort."""
    return list(Counter(map(_COHORT, infos)).items())


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
        self._nodes = nodes
        self._held = held
        self._window_s = window_s
        self._work_s = work_s
        self._free: dict[str, Counted] = {}
        self._taken: dict[str, Counted] = {}
        self._rank: dict[Cohort | None, int] = {}

    def of_job(self, mine: Collection[str], pools: Iterable[str], most: int) -> dict[str, Outlook]:
        """Pool → what a job that holds ``mine`` and may have ``most`` nodes can expect in it."""
        if not self._rank:
            self._look()
        found = {}
        infos = [self._nodes[n] for n in mine]
        for pool in pools:
            own = [info for info in infos if info.node_class == pool]
            cohorts = self._longest(counted(own))
            room, ours = most - len(own), dict(cohorts)
            for others, had in ((self._free, {}), (self._taken, ours)):
                for cohort, count in others.get(pool, ()):
                    if room <= 0:
                        break
                    more = min(room, count - had.get(cohort, 0))
                    if more > 0:
                        cohorts.append((cohort, more))
                        room -= more
            found[pool] = Outlook(cohorts, self._window_s, self._work_s)
        return found

    def _look(self) -> None:
        every = Counter(map(_WHICH, self._nodes.values()))
        cohorts = dict.fromkeys(cohort for _, cohort in every)
        longest = sorted(cohorts, key=self._left_s, reverse=True)
        self._rank = {cohort: rank for rank, cohort in enumerate(longest)}
        held = Counter(map(_WHICH, map(self._nodes.__getitem__, self._held)))
        free: dict[str, Counted] = {}
        taken: dict[str, Counted] = {}
        for (pool, cohort), count in every.items():
            had = held[pool, cohort]
            if had:
                taken.setdefault(pool, []).append((cohort, had))
            if count > had:
                free.setdefault(pool, []).append((cohort, count - had))
        self._free = {pool: self._longest(found) for pool, found in free.items()}
        self._taken = {pool: self._longest(found)[::-1] for pool, found in taken.items()}

    def _longest(self, found: Counted) -> Counted:
        """The cohorts, those that last longest first."""
        rank = self._rank
        return sorted(found, key=lambda item: rank[item[0]])

    def _left_s(self, cohort: Cohort | None) -> float:
        return cohort.expected_s(self._window_s) if cohort else 2.0 * self._window_s
