"""From what is foretold of the nodes to what a job's bid may expect of them. Pure.

Decides in which order a job is taken to have nodes: its own, those that last longest first, then
those that nobody has, then those of other jobs, which give up the ones that end first. How long
each lasts is foretold elsewhere (:mod:`scavenger.lifetimes`); what that is worth is the bid's
(:mod:`allocator.objectives`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from allocator import Cohort, NodeInfo, Outlook

Counted = list[tuple[Cohort | None, int]]


def counted(infos: Iterable[NodeInfo]) -> Counted:
    """How many of these nodes are of each cohort."""
    return list(Counter(info.cohort for info in infos).items())


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
        self._lefts: dict[Cohort | None, float] = {}

    def of_job(self, mine: Collection[str], pools: Iterable[str], most: int) -> dict[str, Outlook]:
        """Pool → what a job that holds ``mine`` and may have ``most`` nodes can expect in it."""
        if not self._free:
            self._look()
        found = {}
        for pool in pools:
            own = [self._nodes[n] for n in mine if self._nodes[n].node_class == pool]
            cohorts = self._longest(own)
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
        free: dict[str, list[NodeInfo]] = {}
        taken: dict[str, list[NodeInfo]] = {}
        for name, info in self._nodes.items():
            free.setdefault(info.node_class, [])
            (taken if name in self._held else free).setdefault(info.node_class, []).append(info)
        self._free = {pool: self._longest(infos) for pool, infos in free.items()}
        self._taken = {pool: self._longest(infos)[::-1] for pool, infos in taken.items()}

    def _longest(self, infos: Iterable[NodeInfo]) -> Counted:
        """The cohorts, those that last longest first."""
        return sorted(counted(infos), key=lambda item: -self._left(item[0]))

    def _left(self, cohort: Cohort | None) -> float:
        if cohort not in self._lefts:
            window_s = self._window_s
            self._lefts[cohort] = cohort.expected_s(window_s) if cohort else 2.0 * window_s
        return self._lefts[cohort]
