"""The admission queue: which jobs may bid, and which are next to have their minimum guaranteed.

Decides who is admitted (in order of submission, the owners in rotation), who starves, and who is
next among those. Whether there are nodes for a guarantee is decided by
:func:`malletrain.core.planning.guarantees`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count, islice

from malletrain.core.gaps import Gaps
from malletrain.core.planning import Candidate
from malletrain.core.pools import by_class, largest
from malletrain.core.state import ControllerState, JobRecord


class AdmissionQueue:
    """The unfinished jobs, in order. ``max_running``: jobs that may run at once; ``starvation_s``:
    how long an admitted job waits for nodes before it starves, seconds.
    """

    def __init__(
        self, state: ControllerState, gaps: Gaps, max_running: int, starvation_s: float
    ) -> None:
        self._state = state
        self._gaps = gaps
        self._max_running = max_running
        self._starvation_s = starvation_s
        self._found: dict[tuple[int, ...], list[JobRecord]] = {}
        self._found_at = 0

    def admitted(self, nodes: Mapping[str, int], *, shared: bool) -> list[JobRecord]:
        """The first unfinished jobs, as many as may run at once, that could run if all these nodes
        (of each pool) were theirs.

        ``shared``: every node may become any owner's. Where there are several owners, the first job
        of each comes before the second of any.
        """
        if self._found_at != self._state.admissions:
            self._found_at = self._state.admissions
            self._found.clear()
        most = {
            owner: max(nodes.values(), default=0) if shared else largest(nodes, owner)
            for owner in self._state.owners
        }
        key = tuple(most.values())
        if key not in self._found:
            fitting: Iterable[JobRecord] = (
                job
                for job in self._state.unfinished.values()
                if job.smallest <= most[job.submitted.owner]
            )
            if len(most) > 1:
                places = {owner: count() for owner in most}
                numbered = [(next(places[job.submitted.owner]), job.order, job) for job in fitting]
                fitting = [job for _, _, job in sorted(numbered)]
            if any(job.pressing for job in self._state.unfinished.values()):
                fitting = sorted(fitting, key=lambda job: not job.pressing)
            self._found[key] = list(islice(fitting, self._max_running))
        return self._found[key]

    def in_reach(self) -> list[JobRecord]:
        """The jobs admitted if every node there is, or could be, were anybody's."""
        reach = by_class(self._state.usable_by_pool) + self._gaps.by_class()
        return self.admitted(reach, shared=True)

    def notice(self, now: float) -> None:
        """Look who has waited for too long, and whose guarantee is over."""
        state, placed = self._state, self.in_reach()
        for job in placed:
            state.waits(job, now)
            if not job.nodes and not job.starving and now >= self._starves_at(job):
                state.starves(job, now)
        for job in state.at_work.values():
            if job.nodes and 0 < job.guaranteed_until <= now:
                state.guarantee(job, 0.0)
                if any(other.starving for other in placed):
                    state.leases_due = True
                    state.plan_soon(now)

    def wakeups(self) -> list[float]:
        """When :meth:`notice` has something to notice although nothing happens."""
        placed = self.in_reach()
        times = [
            self._starves_at(job)
            for job in placed
            if not (job.nodes or job.starving) and job.idle_since is not None
        ]
        if any(job.starving for job in placed):
            times += [
                job.guaranteed_until
                for job in self._state.at_work.values()
                if job.nodes and job.guaranteed_until
            ]
        return times

    def _starves_at(self, job: JobRecord) -> float:
        return (job.idle_since or 0.0) + self._starvation_s

    def starving(self, candidates: Mapping[str, Candidate], now: float) -> list[Candidate]:
        """The starving among the candidates, the longest first.

        None of them is ahead of a job of another owner that has waited for longer and for which
        nodes are still being gathered.
        """
        jobs = self._state.jobs
        waiting = {job.submitted.job: job for job in self.in_reach() if job.starving}
        waiting.update({name: jobs[name] for name in candidates if jobs[name].starving})
        queue: list[Candidate] = []
        gathering: set[str] = set()
        for name, job in sorted(
            waiting.items(), key=lambda item: (item[1].idle_since or 0.0, item[1].order)
        ):
            owner = job.submitted.owner
            if name not in candidates:
                if not self._gaps.backing_off(owner, now):
                    gathering.add(owner)
            elif gathering <= {owner}:
                queue.append(candidates[name])
        return queue
