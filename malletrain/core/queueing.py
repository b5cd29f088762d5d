"""The admission queue: which jobs may bid, and which one is next to have its minimum guaranteed.

An entry of the queue is a job, or all jobs of one sweep, which share the place of the first of them
and wait as one. Decides who is admitted (in order of places, the owners in rotation; where shares
are counted, the parties by weight), who starves, and who of those is next.
:func:`malletrain.core.planning.guarantees` decides whether there are nodes for a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Protocol

from allocator import RescaleCost
from malletrain.core.defaults import TURNS_APART
from malletrain.core.events import JobState
from malletrain.core.gaps import Gaps
from malletrain.core.planning import Candidate
from malletrain.core.pools import by_class, largest
from malletrain.core.records import JobRecord
from malletrain.core.state import ControllerState
from malletrain.core.trainers import Trainer, Trainers


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
    """The unfinished jobs, in order. ``max_running``: entries that may run at once, and how many
    jobs of one sweep may; ``starvation_s``: how long an admitted job waits for its first nodes
    before it starves, seconds; who had nodes before waits ``turns_apart`` times as long, less as
    far as its last turn was cut short, if it may get some otherwise: if its ``start_pays`` within
    the time that plans look ahead.
    ``turns``: whose turn it is; None: the owners take one place each in turn. Each of the
    ``trainers`` has a queue of its own, and as many places.
    """

    def __init__(
        self,
        state: ControllerState,
        gaps: Gaps,
        max_running: int,
        starvation_s: float,
        turns: Turns | None = None,
        trainers: Trainers | None = None,
        turns_apart: float = TURNS_APART,
        start_pays: Callable[[RescaleCost | None], bool] = lambda cost: True,
    ) -> None:
        self._turns = turns
        self._start_pays = start_pays
        self._turns_apart = turns_apart
        self._trainers = trainers or Trainers()
        self._state = state
        self._gaps = gaps
        self.max_running = max_running
        self._starvation_s = starvation_s
        self._cache: dict[tuple[float, ...], list[JobRecord]] = {}
        self._cache_at = -1
        self._enough = math.inf

    def allow(self, max_running: int) -> None:
        """So many jobs may run at once from now on."""
        self.max_running = max_running
        self._cache.clear()

    def admitted(self, nodes: Mapping[str, int], *, shared: bool) -> list[JobRecord]:
        """The first unfinished jobs, as many as may run at once, that could run if all these nodes
        (of each pool) were theirs.

        ``shared``: every node may become any owner's. Where there are several owners or parties,
        the first job of each comes before the second of any, and those follow by weight.
        """
        if self._cache_at != self._state.admissions:
            self._cache_at = self._state.admissions
            self._cache.clear()
            self._enough = self._all_fit_on()
        most = {
            (owner, trainer): min(self._most(nodes, owner, trainer, shared), self._enough)
            for owner in self._state.owners
            for trainer in self._trainers
        }
        key = tuple(most.values())
        if key not in self._cache:
            self._cache[key] = [
                job for trainer in self._trainers for job in self._of_one(trainer, most)
            ]
        return self._cache[key]

    def _all_fit_on(self) -> float:
        """Nodes beyond which some more change nothing: of thousands that join one by one each would
        have the jobs looked through anew.
        """
        if self._turns is not None:
            return math.inf
        sizes = (job.smallest for job in self._state.unfinished.values())
        return max((size for size in sizes if size < math.inf), default=0)

    def _in_order(self) -> Iterable[JobRecord]:
        """The unfinished jobs in order of their places."""
        jobs = self._state.unfinished.values()
        return sorted(jobs, key=lambda job: job.place) if self._state.sweeps else jobs

    def _placed(self, jobs: Iterable[JobRecord]) -> Iterator[JobRecord]:
        """Those for whose entries there is room."""
        entries: dict[int, int] = {}
        for job in jobs:
            of_entry = entries.get(job.place, 0)
            if not of_entry and len(entries) == self.max_running:
                if not self._state.sweeps:
                    return  # no later one is of an entry that has its place
            elif of_entry < self.max_running:
                entries[job.place] = of_entry + 1
                yield job

    def _most(
        self, nodes: Mapping[str, int], owner: str, trainer: Trainer | None, shared: bool
    ) -> int:
        """The most nodes that a job of this owner and trainer could have."""
        usable = self._trainers.usable(nodes, trainer)
        return max(usable.values(), default=0) if shared else largest(usable, owner)

    def _of_one(
        self, trainer: Trainer | None, most: Mapping[tuple[str, Trainer | None], float]
    ) -> Iterable[JobRecord]:
        """The jobs of one trainer that are admitted."""
        fitting: Iterable[JobRecord] = (
            job
            for job in self._in_order()
            if self._trainers.of(job.submitted.trainer) is trainer
            and job.smallest <= most[job.submitted.owner, trainer]
        )
        if self._turns is not None or len(self._state.owners) > 1:
            fitting = self._in_turn(list(fitting), max(most.values(), default=0))
        if any(job.pressing for job in self._state.unfinished.values()):
            fitting = sorted(fitting, key=lambda job: not job.pressing)
        return self._placed(fitting)

    def _in_turn(self, jobs: list[JobRecord], most: float) -> list[JobRecord]:
        """The jobs, which are in order of their places, in the order in which they get them.
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
            for place, entry in groupby(mine, lambda job: job.place):
                turn = (1.0, before / weight) if before else (0.0, load)
                usable_nodes = 0
                for job in entry:
                    keys[job.submitted.job] = (*turn, place)
                    usable_nodes += job.submitted.max_nodes
                before += 1.0 if self._turns is None else min(usable_nodes, most)
        return sorted(jobs, key=lambda job: keys[job.submitted.job])

    def all_awaited(self, owner: str) -> bool:
        """Whether jobs of ``owner`` that have no nodes, and could begin now, need all nodes that
        are idle or may come: a plan a moment later would not put any of them to other use.
        """
        idle = len(self._state.idle)
        if not idle:
            return False
        waited_for = sum(
            job.smallest
            for job in self.in_reach()
            if not job.nodes and job.submitted.owner == owner and job.smallest <= idle
        )
        return idle + sum(self._gaps.by_class().values()) <= waited_for

    def in_reach(self) -> list[JobRecord]:
        """The jobs admitted if every node there is, or could be, were anybody's."""
        reach = by_class(self._state.usable_by_pool) + self._gaps.by_class()
        return self.admitted(reach, shared=True)

    def notice(self, now: float) -> None:
        """Look who has waited for too long, and whose guarantee is over."""
        state, placed = self._state, self.in_reach()
        served = self._served()
        for job in placed:
            if job.idle_since is None:
                state.waits(job, now)
            if job.nodes:
                continue
            if job.place in served:
                state.served_beside(job, now)
            elif not job.starving and now >= self._starves_at(job):
                state.starves(job, now)
        for job in state.at_work.values():
            if 0 < job.guaranteed_until <= now and job.nodes:
                state.guarantee(job, 0.0)
                state.plan_soon(now)  # its nodes may be worth more elsewhere now
                if any(other.starving for other in placed):
                    state.leases_due = True

    def wakeups(self) -> list[float]:
        """When :meth:`notice` has something to notice although nothing happens."""
        placed = self.in_reach()
        served = self._served()
        return [
            *(
                self._starves_at(job)
                for job in placed
                if not (job.nodes or job.starving or job.place in served)
                and job.idle_since is not None
            ),
            *(
                job.guaranteed_until
                for job in self._state.at_work.values()
                if job.nodes and job.guaranteed_until
            ),
        ]

    def _served(self) -> set[int]:
        """The places of the sweeps of which a job has nodes."""
        if not self._state.sweeps:
            return set()
        return {j.place for j in self._state.at_work.values() if j.nodes and j.submitted.sweep}

    def _starves_at(self, job: JobRecord) -> float:
        patience = 1.0 if self._turns is None else self._turns.patience(job.submitted.party)
        if (job.state is JobState.SUSPENDED or job.sweep_served) and self._start_pays(job.cost):
            remaining_share = (
                min(1.0, job.turn_left_s / self._starvation_s) if self._starvation_s else 0.0
            )
            patience = max(
                patience, self._turns_apart + remaining_share * (1.0 - self._turns_apart)
            )
        return (job.idle_since or 0.0) + self._starvation_s * patience

    def starving(self, candidates: Mapping[str, Candidate], now: float) -> list[Candidate]:
        """The starving among the candidates, the longest first; of each sweep one.

        None of them is ahead of a job of its trainer, and another owner's, that has waited for
        longer and for which nodes are still being gathered.
        """
        jobs = self._state.jobs
        waiting = {job.submitted.job: job for job in self.in_reach() if job.starving}
        waiting.update({name: jobs[name] for name in candidates if jobs[name].starving})
        queue: list[Candidate] = []
        entries: set[int] = set()
        gathering: dict[Trainer | None, set[str]] = {}
        for name, job in sorted(
            waiting.items(), key=lambda item: (item[1].idle_since or 0.0, item[1].order)
        ):
            owner = job.submitted.owner
            ahead = gathering.setdefault(self._trainers.of(job.submitted.trainer), set())
            if name not in candidates:
                if not self._gaps.backing_off(owner, now):
                    ahead.add(owner)
            elif ahead <= {owner} and job.place not in entries:
                entries.add(job.place)
                queue.append(candidates[name])
        return queue
