"""The controller's half of queueing: which jobs may bid, and whose turn it is to run at all.

A part of :class:`malletrain.core.controller.Controller` in a file of its own; nobody else makes
one. Decides who is admitted (in order of submission, owners turn by turn), who starves, and who is
next among those. Whether a turn can be given is decided by :func:`malletrain.core.planning.turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count, islice
from typing import TYPE_CHECKING

from malletrain.core.planning import Candidate
from malletrain.core.pools import by_class, largest
from malletrain.core.state import JobRecord

if TYPE_CHECKING:
    from malletrain.core.controller import Controller


class AdmissionQueue:
    """The unfinished jobs of one controller, in line."""

    def __init__(self, controller: Controller) -> None:
        self._of = controller
        self._found: dict[tuple[int, ...], list[JobRecord]] = {}
        self.owners: dict[str, None] = {}
        """Who has submitted a job, in order."""

    def changed(self, job: JobRecord) -> None:
        """The job has come, has ended, or can use other sizes than before."""
        self.owners.setdefault(job.submitted.owner)
        self._found.clear()

    def admitted(self, nodes: Mapping[str, int], *, shared: bool) -> list[JobRecord]:
        """The first unfinished jobs, as many as may run at once, that could run if all these nodes
        (of each pool) were theirs.

        ``shared``: every node may become any owner's. Owners have their jobs admitted turn by turn.
        """
        most = {
            owner: max(nodes.values(), default=0) if shared else largest(nodes, owner)
            for owner in self.owners
        }
        key = tuple(most.values())
        if key not in self._found:
            fitting: Iterable[JobRecord] = (
                job
                for job in self._of._unfinished.values()
                if job.smallest <= most[job.submitted.owner]
            )
            if len(most) > 1:
                places = {owner: count() for owner in most}
                fitting = [
                    job
                    for _, _, job in sorted(
                        (next(places[job.submitted.owner]), job.order, job) for job in fitting
                    )
                ]
            self._found[key] = list(islice(fitting, self._of.settings.planning.max_running))
        return self._found[key]

    def reach(self) -> Mapping[str, int]:
        """How many nodes of each class there are, or could be at once."""
        return by_class(self._of._usable_by_pool) + self._of._gaps.by_class()

    def notice(self, now: float) -> None:
        """Look who has waited for too long, and whose turn is over."""
        c = self._of
        placed = self.admitted(self.reach(), shared=True)
        for job in placed:
            if job.idle_since is None:
                job.idle_since = now
            if (
                not job.nodes
                and not job.starving
                and now >= job.idle_since + c.settings.starvation_s
            ):
                job.starving = c._leases_due = True
                c._plan_soon(now)
        for job in c._at_work.values():
            if job.nodes and 0 < job.turn_until <= now:
                job.turn_until = 0.0
                if any(other.starving for other in placed):
                    c._leases_due = True
                    c._plan_soon(now)

    def wakeups(self) -> list[float]:
        """When :meth:`notice` has something to notice although nothing happens."""
        c = self._of
        placed = self.admitted(self.reach(), shared=True)
        starving = any(job.starving for job in placed)
        waiting = (
            job for job in placed if not (job.nodes or job.starving) and job.idle_since is not None
        )
        times = [(job.idle_since or 0.0) + c.settings.starvation_s for job in waiting]
        return times + [
            job.turn_until
            for job in c._at_work.values()
            if starving and job.nodes and job.turn_until
        ]

    def queue(self, candidates: Mapping[str, Candidate], now: float) -> list[Candidate]:
        """The starving among the candidates, the longest first; none of them is ahead of a job of
        another owner that has waited for longer and for which nodes are still being gathered.
        """
        jobs = self._of.jobs
        waiting = {
            job.submitted.job: job
            for job in self.admitted(self.reach(), shared=True)
            if job.starving
        }
        waiting.update({name: jobs[name] for name in candidates if jobs[name].starving})
        queue: list[Candidate] = []
        gathering: set[str] = set()
        for name, job in sorted(
            waiting.items(), key=lambda item: (item[1].idle_since or 0.0, item[1].order)
        ):
            owner = job.submitted.owner
            if name not in candidates:
                if not self._of._gaps.held_off(owner, now):
                    gathering.add(owner)
            elif gathering <= {owner}:
                queue.append(candidates[name])
        return queue
