"""The admission queue: which jobs may bid, and which are next to have their minimum guaranteed.

Decides who is admitted (in order of submission, the owners in rotation; where shares are counted,
the parties by their weights), who starves, and who is next among those. Whether there are nodes for
a guarantee is decided by :func:`malletrain.core.planning.guarantees`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Protocol

from malletrain.core.gaps import Gaps
from malletrain.core.planning import Candidate
from malletrain.core.pools import by_class, largest
from malletrain.core.records import JobRecord
from malletrain.core.state import ControllerState


class Turns(Protocol):
    """In which proportion the places of the queue go to those who want them."""

    def weight(self, party: str) -> float:
        """For how many nodes it has jobs admitted for each one of a party of weight 1."""
        ...

    def load(self, party: str, begun: bool) -> float:
        """Who has least comes first where all want one place. ``begun``: it has nodes."""
        ...

    def patience(self, party: str) -> float:
        """How much longer than others' its jobs wait until they starve, 1 or more."""
        ...


class AdmissionQueue:
    """The unfinished jobs, in order. ``max_running``: jobs that may run at once; ``starvation_s``:
    how long an admitted job waits for nodes before it starves, seconds. ``turns``: whose turn it
    is; None: the owners take one place each in turn.
    """

    def __init__(
        self,
        state: ControllerState,
        gaps: Gaps,
        max_running: int,
        starvation_s: float,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns
        self._state = state
        self._gaps = gaps
        self._max_running = max_running
        self._starvation_s = starvation_s
        self._found: dict[tuple[int, ...], list[JobRecord]] = {}
        self._found_at = 0

    def allow(self, max_running: int) -> None:
        """So many jobs may run at once from now on."""
        self._max_running = max_running
        self._found.clear()

    def admitted(self, nodes: Mapping[str, int], *, shared: bool) -> list[JobRecord]:
        """The first unfinished jobs, as many as may run at once, that could run if all these nodes
        (of each pool) were theirs.

        ``shared``: every node may become any owner's. Where there are several owners or parties,
        the first job of each comes before the second of any, and those follow by weight.
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
            if self._turns is not None or len(most) > 1:
                fitting = self._in_turn(list(fitting), max(most.values(), default=0))
            if any(job.pressing for job in self._state.unfinished.values()):
                fitting = sorted(fitting, key=lambda job: not job.pressing)
            self._found[key] = list(islice(fitting, self._max_running))
        return self._found[key]

    def _in_turn(self, jobs: list[JobRecord], most: int) -> list[JobRecord]:
        """The jobs, which are in order of submission, in the order in which they get places.
        ``most``: nodes that any of them could have.
        """
        parties: dict[str, list[JobRecord]] = {}
        for job in jobs:
            parties.setdefault(job.submitted.party or job.submitted.owner, []).append(job)
        if len(parties) < 2:
            return jobs
        keys: dict[str, tuple[float, float, int]] = {}
        for party, mine in parties.items():
            weight, load = 1.0, 0.0
            if self._turns is not None:
                weight = self._turns.weight(party)
                load = self._turns.load(party, any(job.nodes for job in mine))
            before = 0.0  # places, or where shares are counted the nodes that they could use
            for job in mine:
                turn = (1.0, before / weight) if before else (0.0, load)
                keys[job.submitted.job] = (*turn, job.order)
                before += 1.0 if self._turns is None else min(job.submitted.max_nodes, most)
        return sorted(jobs, key=lambda job: keys[job.submitted.job])

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
        patience = 1.0 if self._turns is None else self._turns.patience(job.submitted.party)
        return (job.idle_since or 0.0) + self._starvation_s * patience

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
