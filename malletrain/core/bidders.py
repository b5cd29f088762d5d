"""Selects the candidates of a plan from the state: which sizes each admitted job may bid for.

Decides which jobs keep their size whatever a plan prefers, and which ones a hypothetical plan
leaves out. The queue decides who is admitted, the planner how many nodes each job gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from allocator import NodeInfo
from malletrain.core.gaps import Gaps
from malletrain.core.goal_keeper import GoalKeeper
from malletrain.core.planning import Candidate, guarantees
from malletrain.core.pools import class_counts
from malletrain.core.profile_runner import ProfileRunner
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.quotas import Quotas
from malletrain.core.records import JobRecord
from malletrain.core.settings import ControllerSettings
from malletrain.core.shares import Shares
from malletrain.core.state import ControllerState
from malletrain.core.sweep_bids import as_one
from malletrain.core.trainers import Trainer, Trainers


class Bidders:
    """The candidates of one controller's plans."""

    def __init__(
        self,
        state: ControllerState,
        gaps: Gaps,
        queue: AdmissionQueue,
        profiles: ProfileRunner,
        goals: GoalKeeper,
        shares: Shares,
        quotas: Quotas,
        trainers: Trainers,
        settings: ControllerSettings,
    ) -> None:
        self._state = state
        self._gaps = gaps
        self._queue = queue
        self._profiles = profiles
        self._goals = goals
        self._shares = shares
        self._quotas = quotas
        self._trainers = trainers
        self._min_interval_s = settings.min_interval_s
        self._prior_exponent = settings.planning.prior_exponent

    def now(self, now: float) -> list[Candidate]:
        """The bidders for the nodes there are: each for those of its owner."""
        state = self._state
        free = +state.usable_by_pool
        candidates: dict[str, Candidate] = {}
        for job in self._queue.admitted(free, shared=False):
            fixed = self.stays(job, now)
            candidates[job.submitted.job] = _candidate(job, self._trainer(job), fixed=fixed)
            if fixed:
                free -= Counter(state.usable[n].node_class for n in job.nodes)
        holders = [
            c for name, c in candidates.items() if state.jobs[name].guaranteed_until and not c.fixed
        ]
        return self._guaranteed(candidates, holders, free, state.usable, now)

    def imagined(self, nodes: Mapping[str, NodeInfo], now: float) -> list[Candidate]:
        """The bidders for a plan that is only asked how many nodes would be of use to whom: each
        node may become any owner's, and nobody is left alone.

        Guarantees do not count: else the nodes for the next one in the queue would never be asked
        for. A job bids for no more than what it has and the nodes that its owner may ask
        for: none where the owner's leases come to nothing.
        """
        free = class_counts(nodes)
        candidates: dict[str, Candidate] = {}
        fitting: dict[str, int | None] = {}
        for job in self._queue.admitted(free, shared=True):
            spec, current_nodes = job.submitted, len(job.nodes)
            if spec.owner not in fitting:
                fitting[spec.owner] = self._fitting(nodes, spec.owner, now)
            more, c = fitting[spec.owner], _candidate(job, self._trainer(job), shared=True)
            if more is None:
                candidates[spec.job] = c
            elif current_nodes or more >= spec.min_nodes:
                most = min(spec.max_nodes, max(spec.min_nodes, current_nodes + more))
                candidates[spec.job] = c.but(max_nodes=most)
        return self._guaranteed(candidates, [], free, nodes, now)

    def _fitting(self, nodes: Mapping[str, NodeInfo], owner: str, now: float) -> int | None:
        """How many of the nodes that no job of ``owner`` has could become that owner's; None: all
        of them.
        """
        if self._gaps.backing_off(owner, now):
            return 0
        if not self._gaps.choosy:
            return None
        records, jobs = self._state.nodes, self._state.jobs
        return sum(
            self._gaps.fits(name, owner, now)
            for name in nodes
            if not (
                name in records
                and (job := records[name].job) is not None
                and jobs[job].submitted.owner == owner
            )
        )

    def _guaranteed(
        self,
        candidates: dict[str, Candidate],
        holders: list[Candidate],
        free: Mapping[str, int],
        nodes: Mapping[str, NodeInfo],
        now: float,
    ) -> list[Candidate]:
        starving = self._queue.starving(candidates, now)
        remaining_nodes = self._goals.left_for_turns(candidates.values(), free, nodes)
        newcomers = self._newcomers(candidates, nodes)
        chosen = guarantees(holders, [*starving, *newcomers], remaining_nodes, nodes)
        bidders = [c.but(must_run=True) if name in chosen else c for name, c in candidates.items()]
        # A goal goes by the weight that its job has in the end, beside jobs of its trainer only.
        weighed = self._shares.weigh(self._sweeps_as_one(bidders, len(nodes)))
        bids = []
        for trainer in self._trainers:
            mine = [c for c in weighed if c.trainer is trainer]
            bids += self._goals.bids(mine, now, trainer.deadline_weight if trainer else None)
        return self._quotas.within(bids)

    def _newcomers(
        self, candidates: Mapping[str, Candidate], nodes: Mapping[str, NodeInfo]
    ) -> list[Candidate]:
        """Those of whose speed nothing is known before they have run: they run at once, where their
        smallest size is no more than an even share of the nodes.
        """
        jobs, even = self._state.jobs, len(nodes) / max(1, len(candidates))
        return [
            c
            for name, c in candidates.items()
            if not c.nodes and (c.smallest or 0) <= even and self._profiles.unseen(jobs[name])
        ]

    def _sweeps_as_one(self, bidders: list[Candidate], nodes: int) -> list[Candidate]:
        state = self._state
        if not state.sweeps:
            return bidders
        jobs = ((c.job, state.jobs[c.job].submitted.sweep) for c in bidders)
        sweeps = {name: sweep for name, sweep in jobs if sweep}
        return as_one(bidders, sweeps, nodes, self._prior_exponent)

    def _trainer(self, job: JobRecord) -> Trainer | None:
        return self._trainers.of(job.submitted.trainer)

    def stays(self, job: JobRecord, now: float) -> bool:
        """Whether the job keeps its nodes whatever a plan would like: nothing forces it, and it is
        profiled, is rescaling or was a moment ago. In the last case a plan is due when it has
        rested.
        """
        state = self._state
        if job.broken or not job.accepts(len(job.nodes)) or not state.none_leaves(job.nodes):
            return False
        if self._profiles.holds(job):
            return True
        rested = job.rescaled_at + self._min_interval_s
        if not job.rescaling and now < rested:
            state.plan_soon(rested)
        return job.rescaling or now < rested


def _candidate(
    job: JobRecord, trainer: Trainer | None, *, fixed: bool = False, shared: bool = False
) -> Candidate:
    spec = job.submitted
    return Candidate(
        spec.job,
        spec.min_nodes,
        spec.max_nodes,
        job.nodes,
        weight=spec.weight,
        goal=trainer.goal if trainer else spec.goal,
        curve=job.curve,
        sizes=job.sizes,
        cost=job.cost,
        fixed=fixed,
        broken=job.broken,
        owner=None if shared else spec.owner,
        trainer=trainer,
    )
