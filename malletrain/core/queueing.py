"""The admission queue: decides which jobs may bid, and which one is next to get its minimum
guaranteed.

An entry of the queue is a job or a sweep. The jobs of a sweep share the place of the first one and
wait as one. Decides which jobs are admitted (in order of places, with the owners in rotation or,
with shares, the parties by weight), which starve, and which of those is next.
:func:`malletrain.core.planning.guarantees` decides whether there are nodes for a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Protocol

from allocator import RescaleCost
from malletrain.core.events import JobState
from malletrain.core.gaps import Gaps
from malletrain.core.planning import Candidate
from malletrain.core.pools import Pool, Trainer, Trainers, by_class, largest
from malletrain.core.records import JobRecord
from malletrain.core.settings import ControllerSettings
from malletrain.core.state import ControllerState


class Turns(Protocol):
    """Proportions in which parties get places of the queue."""

    def weight(self, party: str) -> float:
        """Return the number of nodes for which it has jobs admitted per node of a party of weight
        1.
        """
        ...

    def load(self, party: str, begun: bool) -> float:
        """Return the sort key of a party for a place; the lowest comes first. ``begun``: it has
        nodes.
        """
        ...

    def patience(self, party: str) -> float:
        """Return the factor on the time until its jobs starve, at least 1."""
        ...


class AdmissionQueue:
    """The unfinished jobs, in order.

    Args:
        state: jobs and nodes.
        gaps: gaps that may become nodes.
        max_running: maximum number of entries that run at once, for each trainer, and of running
            jobs of one sweep.
        starvation_s: time that an admitted job waits for its first nodes before it starves,
            seconds.
        turns: proportions of the parties; None for the owners in rotation.
        trainers: each has its own queue.
        turns_apart: factor on ``starvation_s`` for a job that had nodes before. It is lower if the
            job's last turn was cut short. It applies only if ``start_pays``, because otherwise the
            job gets no nodes without starving.
        start_pays: returns whether a start with these costs (None: unknown) pays within the
            forward-looking time.
    """

    def __init__(
        self,
        state: ControllerState,
        gaps: Gaps,
        max_running: int,
        starvation_s: float,
        turns: Turns | None = None,
        trainers: Trainers | None = None,
        turns_apart: float = ControllerSettings.turns_apart,
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
        self._enough_nodes = math.inf

    def allow(self, max_running: int) -> None:
        """Change the maximum number of entries that run at once."""
        self.max_running = max_running
        self._cache.clear()

    def admitted(self, nodes: Mapping[Pool, int], *, shared: bool) -> list[JobRecord]:
        """Return the admitted jobs: the first unfinished ones, up to the limits, that could run if
        they had all ``nodes`` (pool → number) of a pool.

        ``shared``: any owner can get any node. With several owners or parties, the first job of
        each comes before the second of any; the further ones follow by weight.
        """
        if self._cache_at != self._state.admissions:
            self._cache_at = self._state.admissions
            self._cache.clear()
            self._enough_nodes = self._largest_minimum()
        max_nodes = {
            (owner, trainer, node_class): min(
                self._max_nodes(nodes, owner, trainer, node_class, shared), self._enough_nodes
            )
            for owner in self._state.owners
            for trainer in self._trainers
            for node_class in self._state.job_classes
        }
        key = tuple(max_nodes.values())
        if key not in self._cache:
            self._cache[key] = [
                job
                for trainer in self._trainers
                for job in self._jobs_of_trainer(trainer, max_nodes)
            ]
        return self._cache[key]

    def _largest_minimum(self) -> float:
        """Return the number of nodes beyond which further ones change nothing. Without it, each of
        thousands of joining nodes would cause a scan of all jobs.
        """
        if self._turns is not None:
            return math.inf
        sizes = (job.smallest for job in self._state.unfinished.values())
        return max((size for size in sizes if size < math.inf), default=0)

    def _in_order(self) -> Iterable[JobRecord]:
        """Return the unfinished jobs in order of their places."""
        jobs = self._state.unfinished.values()
        return sorted(jobs, key=lambda job: job.place) if self._state.sweeps else jobs

    def _placed(self, jobs: Iterable[JobRecord]) -> Iterator[JobRecord]:
        """Yield the jobs whose entries are within the limits."""
        entries: dict[int, int] = {}
        for job in jobs:
            jobs_of_entry = entries.get(job.place, 0)
            if not jobs_of_entry and len(entries) == self.max_running:
                if not self._state.sweeps:
                    return  # without sweeps each job is its own entry
            elif jobs_of_entry < self.max_running:
                entries[job.place] = jobs_of_entry + 1
                yield job

    def _max_nodes(
        self,
        nodes: Mapping[Pool, int],
        owner: str,
        trainer: Trainer | None,
        node_class: str,
        shared: bool,
    ) -> int:
        """Return the maximum number of nodes that a job of this owner, trainer and class of nodes
        (empty: any) could have.
        """
        usable = self._trainers.usable(nodes, trainer)
        if node_class:
            usable = {pool: n for pool, n in usable.items() if pool.is_of_class(node_class)}
        return max(usable.values(), default=0) if shared else largest(usable, owner)

    def _jobs_of_trainer(
        self, trainer: Trainer | None, max_nodes: Mapping[tuple[str, Trainer | None, str], float]
    ) -> Iterable[JobRecord]:
        """Return the admitted jobs of one trainer."""
        fitting: Iterable[JobRecord] = (
            job
            for job in self._in_order()
            if self._trainers.of(job.submitted.trainer) is trainer
            and job.smallest <= max_nodes[job.submitted.owner, trainer, job.submitted.node_class]
        )
        if self._turns is not None or len(self._state.owners) > 1:
            own = (count for (_, other, _), count in max_nodes.items() if other is trainer)
            fitting = self._in_turn(list(fitting), max(own, default=0))
        if any(job.pressing for job in self._state.unfinished.values()):
            fitting = sorted(fitting, key=lambda job: not job.pressing)
        return self._placed(fitting)

    def _in_turn(self, jobs: list[JobRecord], max_nodes: float) -> list[JobRecord]:
        """Return the jobs in the order of admission. ``jobs``: in order of their places;
        ``max_nodes``: maximum number of nodes that any of them could have.
        """
        parties: dict[str, list[JobRecord]] = {}
        for job in jobs:
            parties.setdefault(job.submitted.party or job.submitted.owner, []).append(job)
        if len(parties) < 2:
            return jobs
        keys: dict[str, tuple[float, float, int]] = {}
        for party, party_jobs in parties.items():
            weight, load = 1.0, 0.0
            if self._turns is not None:
                weight = self._turns.weight(party)
                load = self._turns.load(party, any(job.nodes for job in party_jobs))
            before = (
                0.0  # number of earlier places, or with shares the nodes that their jobs could use
            )
            for place, entry in groupby(party_jobs, lambda job: job.place):
                turn = (1.0, before / weight) if before else (0.0, load)
                usable_nodes = 0
                for job in entry:
                    keys[job.submitted.job] = (*turn, place)
                    usable_nodes += job.submitted.max_nodes
                before += 1.0 if self._turns is None else min(usable_nodes, max_nodes)
        return sorted(jobs, key=lambda job: keys[job.submitted.job])

    def all_awaited(self, owner: str) -> bool:
        """Return whether waiting jobs of ``owner`` that could start now need all nodes that are
        idle or may come. Then a later plan would not use any of the nodes otherwise.
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
        """Return the jobs that are admitted if any job can get any node or gap."""
        reachable_nodes = by_class(self._state.usable_by_pool) + self._gaps.by_class()
        ownerless = {Pool(node_class): n for node_class, n in reachable_nodes.items()}
        return self.admitted(ownerless, shared=True)

    def notice(self, now: float) -> None:
        """Find the jobs that starve now and those whose guarantee ends."""
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
                state.plan_soon(now)  # other jobs may have more use for its nodes now
                if any(other.starving for other in placed):
                    state.leases_due = True

    def wakeups(self) -> list[float]:
        """Return the times at which :meth:`notice` is due even if no event occurs."""
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
        """Return the places of the sweeps with a job that has nodes."""
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
        """Return the starving candidates, the longest-waiting first; one of each sweep.

        None of them overtakes a job of another owner with the same trainer that has waited longer
        and for which nodes are still being leased.
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
            gathering_owners = gathering.setdefault(self._trainers.of(job.submitted.trainer), set())
            if name not in candidates:
                if not self._gaps.backing_off(owner, now):
                    gathering_owners.add(owner)
            elif gathering_owners <= {owner} and job.place not in entries:
                entries.add(job.place)
                queue.append(candidates[name])
        return queue
