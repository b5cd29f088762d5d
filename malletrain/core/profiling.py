"""Between the controller and the profiling advisor: which jobs ask for a profile, and what is
learnt. Pure.

Decides when a job is proposed for a profile and how its ordinary progress corrects its curve. The
advisor (:mod:`jpa.advisor`) decides sizes, order and donors; the controller moves the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from allocator import NodeInfo, RescaleCost
from jpa import (
    Advisor,
    AdvisorAnswer,
    AdvisorTick,
    CurveChange,
    Donor,
    JobEnded,
    Monitor,
    NodesChanged,
    Prior,
    PriorReceived,
    ProfileRequested,
    ProfileResult,
    ProgressReported,
    RescaleCosts,
    ScaleReached,
    ScriptCrashed,
)
from malletrain.core.events import Progressed
from malletrain.core.phases import PhaseTracker
from malletrain.core.pools import owner_of, pool
from malletrain.core.profile_worth import ProfileWorth
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ProfilingSettings
from malletrain.core.siblings import SharedCurves


@dataclass(frozen=True)
class Machine:
    """The nodes as they are now. ``usable``: every one that can be planned with; ``idle``: those
    without a job; ``coming``: more are on their way. ``rest_s``: a job is left alone for so long
    after a rescale.
    """

    usable: Mapping[str, NodeInfo]
    idle: Iterable[str]
    coming: bool = False
    rest_s: float = 0.0


@dataclass(frozen=True)
class Observed:
    """The ordinary progress of a running job corrected its curve. ``surprise``: by so much,
    relative, at the size it was seen at.
    """

    job: str
    scaling: ScalingModel
    change: CurveChange | None
    surprise: float


@dataclass
class _Watch:
    """What is remembered of one job's progress."""

    monitor: Monitor
    phases: PhaseTracker


class Profiler:
    """The advisor, and what the controller has told it."""

    def __init__(self, settings: ProfilingSettings, cost: RescaleCost) -> None:
        self.settings = settings
        self.advisor = Advisor(settings.advisor)
        self._costs = RescaleCosts(cost.up_s, cost.down_s, cost.start_s)
        self._wish_classes: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._formed: dict[str, float] = {}
        self._watches: dict[str, _Watch] = {}
        self.shared = SharedCurves()
        self.worth = ProfileWorth(settings)
        self.tick_at: float | None = None
        """When :meth:`review` is due although nothing happens."""

    @property
    def profiling(self) -> str | None:
        """The job being profiled."""
        return self.advisor.profiling

    def begin(self, scaling: ScalingModel | None) -> ScalingModel:
        """What a new job starts with."""
        return scaling or ScalingModel(costs=self._costs)

    def wants(self, job: JobRecord) -> bool:
        """Whether the job is to be profiled (again)."""
        spec = job.submitted
        if (
            not spec.profile
            or spec.curve is not None
            or spec.min_nodes == spec.max_nodes
            or (job.sizes and len(job.sizes) == 1)
        ):
            return False
        return not job.scaling.profiled or self._incomplete(job)

    def wishes(self, job: JobRecord, others: Sequence[JobRecord], now: float) -> bool:
        """Whether it is to be profiled now: it wants it, and that is worth what it costs."""
        if not self.wants(job):
            return False
        if not self.settings.when_worth or job.submitted.job == self.profiling:
            return True
        return self.worth.ready(job) and self.worth.pays(job, others, now)

    def spared(self, jobs: Sequence[JobRecord], now: float) -> list[JobRecord]:
        """Those that would be profiled if that were worth it, and of which this was not said."""
        if not self.settings.when_worth:
            return []
        return [
            job
            for job in jobs
            if not job.scaling.result
            and self.wants(job)
            and self.worth.ready(job)
            and not self.wishes(job, jobs, now)
            and self.worth.has_estimate(job.submitted.job)
        ]

    # --- what happened ---

    def review(
        self, jobs: Sequence[JobRecord], machine: Machine, now: float
    ) -> list[AdvisorAnswer]:
        """Tell the advisor of the nodes and of the jobs that want a profile; ``jobs``: those that
        may run.
        """
        wishing = {job.submitted.job: job for job in jobs if self.wishes(job, jobs, now)}
        self._since = {
            name: self._since.get(name, now)
            for name, job in wishing.items()
            if not job.scaling.profiled
        }
        answers: list[AdvisorAnswer] = []
        free = Counter(machine.usable[n].node_class for n in machine.idle)
        for name, node_class in list(self._wish_classes.items()):
            job = wishing.get(name)
            if name != self.profiling and (
                job is None or self._class_of(job, machine, free) != node_class
            ):
                answers += self._withdraw(name, now)
        if self.profiling is None and not wishing:
            self.tick_at = None
            return answers
        answers += self.advisor.handle(self._nodes(jobs, machine, free, now), now)
        for name, job in wishing.items():
            if name not in self._wish_classes and self._ready(job, machine, free, now):
                answers += self._ask(job, self._class_of(job, machine, free), now)
        active = self.profiling
        if active is not None and now - self._formed.get(active, now) >= self.settings.silence_s:
            del self._formed[active]  # said once
            answers += self.advisor.handle(ScaleReached(active, self.advisor.target or 0), now)
        answers += self.advisor.handle(AdvisorTick(), now)
        self.tick_at = self._next_tick(now)
        return answers

    def progressed(
        self, job: JobRecord, event: Progressed, now: float
    ) -> list[AdvisorAnswer | Observed]:
        """One report of a job that runs undisturbed on ``event.nodes`` nodes."""
        watch = self._watch(job)
        phase = watch.phases.feed(event.nodes, event.batch)
        if event.job == self.profiling:
            return list(
                self.advisor.handle(
                    ProgressReported(event.job, event.time, event.samples, phase), now
                )
            )
        if job.submitted.curve is not None:
            return []
        curve, change = job.scaling.curve.with_phase(phase, self.settings.advisor.curve)
        seen = watch.monitor.feed(event.time, event.samples, event.nodes, phase)
        surprise = 0.0
        if seen is not None:
            before = curve.estimate(event.nodes)[0] if curve.has_data else 0.0
            self.worth.seen(curve, event.nodes, seen.rate)
            curve, drift = curve.observe(
                event.nodes, seen.rate, seen.half_width, now, self.settings.advisor.curve
            )
            change = drift or change
            surprise = abs(curve.estimate(event.nodes)[0] / before - 1) if before > 0 else 1.0
        if curve is job.scaling.curve:
            return []
        scaling = replace(job.scaling, curve=curve)
        if change is not None and scaling.profiled:
            scaling = replace(scaling, profiled=False, reason=change.sentence)
        return [Observed(event.job, scaling, change, surprise)]

    def another_model(self, job: JobRecord, name: str) -> None:
        """The job's script trains this model from now on."""
        self._watch(job).phases.another_model(name)

    def _watch(self, job: JobRecord) -> _Watch:
        name = job.submitted.job
        if name not in self._watches:
            phases = PhaseTracker(job.scaling.curve.phase)
            self._watches[name] = _Watch(Monitor(self.settings.window_s), phases)
        return self._watches[name]

    def scaled(self, job: str, nodes: int, now: float) -> list[AdvisorAnswer]:
        """The job processes samples at this scale."""
        self._formed.pop(job, None)
        return self.advisor.handle(ScaleReached(job, nodes), now) if job == self.profiling else []

    def formed(self, job: str, now: float) -> None:
        """All workers of the job's newest round have been started."""
        if job == self.profiling:
            self._formed[job] = now

    def crashed(self, job: str, nodes: int, now: float) -> list[AdvisorAnswer]:
        """The script failed by itself at this scale."""
        self._formed.pop(job, None)
        return self.advisor.handle(ScriptCrashed(job, nodes), now)

    def moved(self, job: str) -> None:
        """A rescale of the job began: nothing of before counts."""
        self._formed.pop(job, None)

    def gone(self, job: str, now: float) -> list[AdvisorAnswer]:
        """The job has ended."""
        for forgotten in (self._wish_classes, self._since, self._formed, self._watches):
            forgotten.pop(job, None)
        self.shared.forget(job)
        return self.advisor.handle(JobEnded(job), now)

    def limited(self, job: str, now: float) -> list[AdvisorAnswer]:
        """The limits of the job's scale changed: what was asked for it counts no more."""
        return self._withdraw(job, now) if job in self._wish_classes else []

    def forget_wish(self, job: str) -> None:
        """The job's profile is over, or it waits anew: it may be put forward again."""
        self._wish_classes.pop(job, None)
        self._since.pop(job, None)

    def lacks(self, job: str, current_nodes: int, now: float) -> list[AdvisorAnswer]:
        """The nodes asked for are not there any more: the job holds only ``current_nodes``."""
        return self.advisor.handle(NodesChanged({}, (), {job: current_nodes}), now)

    def class_of(self, job: str) -> str:
        """The class of nodes that the job was put forward for."""
        return self._wish_classes.get(job, "default")

    def prior_suggested(self, job: JobRecord, prior: Prior, now: float) -> list[AdvisorAnswer]:
        """What other jobs suggest has become known: a profile that waits begins from there, one
        under way goes on from there.
        """
        return self.advisor.handle(
            PriorReceived(job.submitted.job, prior, job.submitted.profile_sizes), now
        )

    # --- inside ---

    def _withdraw(self, name: str, now: float) -> list[AdvisorAnswer]:
        del self._wish_classes[name]
        return self.advisor.handle(JobEnded(name), now)

    def _ready(self, job: JobRecord, machine: Machine, free: Mapping[str, int], now: float) -> bool:
        """Whether the job is put forward now: all its nodes can be had at once, or it has waited
        for more.
        """
        largest = max(job.sizes or (job.submitted.max_nodes,))
        current_nodes = self._usable_count(job, machine)
        enough = current_nodes + free.get(self._class_of(job, machine, free), 0) >= largest
        if self._incomplete(job):
            return enough and now - (job.scaling.ended or 0.0) >= self.settings.again_s
        if enough:
            return True
        patience = self.settings.lease_patience_s * (3 if machine.coming else 1)
        return now >= self._since[job.submitted.job] + patience

    @staticmethod
    def _incomplete(job: JobRecord) -> bool:
        """Whether its profile lacks the largest sizes because their nodes could not be had."""
        if not job.scaling.profiled or job.scaling.result != ProfileResult.PARTIAL.value:
            return False
        largest = max(job.sizes or (job.submitted.max_nodes,))
        return max(job.scaling.curve.measured_sizes, default=0) < largest

    def _ask(self, job: JobRecord, node_class: str, now: float) -> list[AdvisorAnswer]:
        spec = job.submitted
        self._wish_classes[spec.job] = node_class
        sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        chosen = spec.profile_sizes
        fresh = not job.scaling.profiled and job.scaling.curve.current.prior is None
        if chosen is None and fresh and len(sizes) <= self.settings.every_size_up_to:
            chosen = tuple(sizes)
        wish = ProfileRequested(
            spec.job,
            spec.min_nodes,
            spec.max_nodes,
            len(job.nodes),
            job.sizes,
            chosen,
            job.scaling.curve,
            node_class,
            spec.kind,
        )
        return self.advisor.handle(wish, now)

    def _nodes(
        self, jobs: Sequence[JobRecord], machine: Machine, free: Counter[str], now: float
    ) -> NodesChanged:
        """Who has what. A profile takes no node that a job before it in the queue, or a starving
        one, needs to run at all; and while one starves nobody is interrupted.
        """
        remaining = Counter(free)
        ahead = True
        for job in jobs:
            waits = self.wants(job) and not self.settings.when_worth
            ahead = ahead and not waits
            if not job.nodes and (ahead or job.starving) and not waits:
                node_class = self._class_of(job, machine, free)
                remaining[node_class] = max(0, remaining[node_class] - int(job.smallest))
        starving = any(job.starving and not job.nodes for job in jobs)
        nodes_of_jobs = {job.submitted.job: self._usable_count(job, machine) for job in jobs}
        if self.profiling is not None:
            nodes_of_jobs.setdefault(self.profiling, 0)
        donors = (
            ()
            if starving
            else tuple(
                self._donor(job, machine) for job in jobs if self._may_give(job, machine, now)
            )
        )
        return NodesChanged(dict(remaining), donors, nodes_of_jobs)

    def _may_give(self, job: JobRecord, machine: Machine, now: float) -> bool:
        return (
            bool(job.nodes)
            and not (job.rescaling or job.broken or job.guaranteed_until)
            and job.submitted.job != self.profiling
            and now >= job.rescaled_at + machine.rest_s
            and all(n in machine.usable for n in job.nodes)
        )

    @staticmethod
    def _donor(job: JobRecord, machine: Machine) -> Donor:
        node_class = machine.usable[job.nodes[0]].node_class
        return Donor(
            job.submitted.job,
            len(job.nodes),
            int(job.smallest),
            job.interrupted_at,
            job.sizes,
            node_class,
        )

    @staticmethod
    def _usable_count(job: JobRecord, machine: Machine) -> int:
        return sum(n in machine.usable for n in job.nodes)

    def _class_of(self, job: JobRecord, machine: Machine, free: Mapping[str, int]) -> str:
        """The pool the job is, or would be, profiled in: its own, the one it waits for, or that of
        which most nodes are free.
        """
        own_class = next(
            (machine.usable[n].node_class for n in job.nodes if n in machine.usable), None
        )
        owner = job.submitted.owner
        mine = (name for name in free if owner_of(name) == owner)
        return (
            own_class
            or self._wish_classes.get(job.submitted.job)
            or max(mine, key=lambda c: (free[c], c), default=pool("default", owner))
        )

    def _next_tick(self, now: float) -> float | None:
        if self.profiling is not None:
            return now + 1.0
        if self._wish_classes:
            return now + 10.0
        waits = [
            since + self.settings.lease_patience_s * n
            for since in self._since.values()
            for n in (1, 3)
        ]
        return min((t for t in waits if t > now), default=now + 10.0 if self._since else None)
