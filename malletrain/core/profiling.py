"""Connects the controller to the profiling advisor: decides which jobs request a profile, and
updates their scaling models. Pure.

Decides when a job requests a profile, and how its progress outside a profile corrects its scaling
curve. The advisor (:mod:`jpa.advisor`) decides sizes, order and donors; the controller moves the
nodes.

A curve holds for one phase of a job's training, which :class:`PhaseTracker` detects from the global
batch size in its reports and the model that its script states. A phase ends when the batch size
changes permanently at the same number of nodes. The smaller last batch of an epoch does not end it,
nor does another batch size at another scale, because a job may keep its batch size per node. A
phase is named after its batch size relative to the first phase (``batch x2``), so its name is the
same at every scale. If the script states a global batch, phases that differ only in their batch
share one law of step times, and no profile follows. A change of the model ends a phase too and is
added to the name (``batch x2, model 3e+06``), and so does a change of the layout of the nodes
(``batch x2, layout 4 processes × 2 threads``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from allocator import RescaleCost
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
from jpa.curve import BATCH, DEFAULT_PHASE, batch_ratio
from malletrain.core.events import Progressed
from malletrain.core.pools import DEFAULT_CLASS, Pool, PoolNode, Trainers
from malletrain.core.profile_worth import ProfileWorth
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ProfilingSettings
from malletrain.core.siblings import SharedCurves

WINDOW = 15
"""Number of reports whose median is the batch size."""
_TOLERANCE = 0.02
_MODEL = ", model "
_LAYOUT = ", layout "


class PhaseTracker:
    """Tracks the phase of one job. ``phase``: the phase at the start, such as after a restart of
    the daemon.
    """

    def __init__(self, phase: str = DEFAULT_PHASE) -> None:
        rest, _, self._layout = phase.partition(_LAYOUT)
        self._batch, _, self._model = rest.partition(_MODEL)
        self._ratio = batch_ratio(self._batch)
        self._nodes = 0
        self._reference: dict[int, float] = {}
        self._is_global = False
        self._recent: deque[float] = deque(maxlen=WINDOW)

    @property
    def phase(self) -> str:
        """The job's current phase."""
        model = f"{_MODEL}{self._model}" if self._model else ""
        layout = f"{_LAYOUT}{self._layout}" if self._layout else ""
        return f"{self._batch}{model}{layout}"

    def another_model(self, name: str) -> None:
        """Start a phase with another model, as the script reports."""
        self._model = name

    def another_layout(self, name: str) -> None:
        """Start a phase in another layout of the nodes."""
        self._layout = name

    def global_batch(self, ratio: float) -> None:
        """Enter the phase of a global batch that the script states, and compare the batches of all
        scales with one another from now on. ``ratio``: that batch relative to the script's first.
        """
        self._is_global = True
        if abs(ratio / self._ratio - 1) > _TOLERANCE:
            self._enter(ratio)

    def feed(self, nodes: int, batch: float) -> str:
        """Add the batch size of one report at a scale of ``nodes``. Return the job's phase."""
        if nodes != self._nodes:
            self._nodes = nodes
            self._recent.clear()
        if batch > 0:
            self._recent.append(batch)
        if len(self._recent) == WINDOW:
            self._decide(nodes, median(self._recent))
        return self.phase

    def _decide(self, nodes: int, batch: float) -> None:
        # The batch size of the first phase at this scale is known only if the job ran here before.
        scale = 0 if self._is_global else nodes
        ratio = batch / self._reference.setdefault(scale, batch / self._ratio)
        if abs(ratio / self._ratio - 1) > _TOLERANCE:
            self._enter(ratio)

    def _enter(self, ratio: float) -> None:
        self._ratio = 1.0 if abs(ratio - 1) <= _TOLERANCE else ratio
        self._batch = DEFAULT_PHASE if self._ratio == 1.0 else f"{BATCH}{self._ratio:.3g}"
        self._recent.clear()


@dataclass(frozen=True)
class Machine:
    """The current nodes."""

    usable: Mapping[str, PoolNode]
    """The nodes that plans can use."""
    idle: Iterable[str]
    """The usable nodes without a job."""
    coming: bool = False
    """Whether more nodes are expected."""
    rest_s: float = 0.0
    """Minimum time between two rescales of a job, seconds."""


@dataclass(frozen=True)
class Observed:
    """Progress outside a profile has changed a job's scaling curve."""

    job: str
    scaling: ScalingModel
    """The new scaling model."""
    change: CurveChange | None
    """Significant change of the curve; None if there is none."""
    surprise: float
    """Relative change of the estimate at the job's current scale."""


@dataclass
class _JobProgress:
    """Progress of one job."""

    monitor: Monitor
    phases: PhaseTracker


class Profiler:
    """Wraps the advisor and tracks the profile request of each job."""

    def __init__(self, settings: ProfilingSettings, cost: RescaleCost, trainers: Trainers) -> None:
        self.settings = settings
        self._trainers = trainers
        self.advisor = Advisor(settings.advisor)
        self._costs = RescaleCosts(cost.up_s, cost.down_s, cost.start_s)
        self._requested_pool: dict[str, Pool] = {}
        self._waiting_since: dict[str, float] = {}
        self._workers_started_at: dict[str, float] = {}
        self._progress: dict[str, _JobProgress] = {}
        self.shared = SharedCurves()
        self.worth = ProfileWorth(settings)
        self.tick_at: float | None = None
        """Time at which to call :meth:`review` even if no event occurs."""

    @property
    def profiling(self) -> str | None:
        """The job that is being profiled, or None."""
        return self.advisor.profiling

    def begin(self, scaling: ScalingModel | None) -> ScalingModel:
        """Return the scaling model of a new job."""
        return scaling or ScalingModel(costs=self._costs)

    def wants(self, job: JobRecord) -> bool:
        """Return whether the job needs a first or another profile."""
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
        """Return whether to profile the job now: it needs a profile, and the profile is worth its
        cost.
        """
        if not self.wants(job):
            return False
        if not self.settings.when_worth or job.submitted.job == self.profiling:
            return True
        return self.worth.ready(job) and self.worth.pays(job, others, now)

    def spared(self, jobs: Sequence[JobRecord], now: float) -> list[JobRecord]:
        """Return the jobs whose profile is not worth its cost and for which this is not yet
        reported.
        """
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
        """Send the current nodes and the profile requests to the advisor.

        Args:
            jobs: the admitted jobs in queue order.
            machine: the current nodes.
            now: time on the shell's clock.

        Returns:
            The advisor's answers.
        """
        requesting = {job.submitted.job: job for job in jobs if self.wishes(job, jobs, now)}
        self._waiting_since = {
            name: self._waiting_since.get(name, now)
            for name, job in requesting.items()
            if not job.scaling.profiled
        }
        answers: list[AdvisorAnswer] = []
        free = Counter(machine.usable[n].pool for n in machine.idle)
        for name, pool in list(self._requested_pool.items()):
            job = requesting.get(name)
            if name != self.profiling and (
                job is None or self._pool_for(job, machine, free) != pool
            ):
                answers += self._withdraw_request(name, now)
        if self.profiling is None and not requesting:
            self.tick_at = None
            return answers
        answers += self.advisor.handle(self._advisor_view(jobs, machine, free, now), now)
        for name, job in requesting.items():
            if name not in self._requested_pool and self._can_request(job, machine, free, now):
                answers += self._request_profile(job, self._pool_for(job, machine, free), now)
        active = self.profiling
        if (
            active is not None
            and now - self._workers_started_at.get(active, now) >= self.settings.silence_s
        ):
            del self._workers_started_at[active]  # send it once
            answers += self.advisor.handle(ScaleReached(active, self.advisor.target or 0), now)
        answers += self.advisor.handle(AdvisorTick(), now)
        self.tick_at = self._next_tick(now)
        return answers

    def progressed(
        self, job: JobRecord, event: Progressed, now: float
    ) -> list[AdvisorAnswer | Observed]:
        """Handle a progress report of a job that runs on ``event.nodes`` nodes and is not
        rescaling.
        """
        watch = self._progress_of(job)
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
        measurement = watch.monitor.feed(event.time, event.samples, event.nodes, phase)
        surprise = 0.0
        if measurement is not None:
            before = curve.estimate(event.nodes)[0] if curve.has_data else 0.0
            self.worth.seen(curve, event.nodes, measurement.rate)
            curve, drift = curve.observe(
                event.nodes,
                measurement.rate,
                measurement.half_width,
                now,
                self.settings.advisor.curve,
            )
            change = drift or change
            surprise = abs(curve.estimate(event.nodes)[0] / before - 1) if before > 0 else 1.0
        if curve is job.scaling.curve:
            return []
        scaling = replace(job.scaling, curve=curve)
        if change is not None and change.kind != "batch" and scaling.profiled:
            scaling = replace(scaling, profiled=False, reason=change.sentence)
        return [Observed(event.job, scaling, change, surprise)]

    def batch_reported(self, job: JobRecord, ratio: float) -> Observed | None:
        """Note that the job's script states a global batch, so that its phases in other batches
        share one law of step times.

        Args:
            job: the job.
            ratio: that batch relative to the one with which the script created its sampler.

        Returns:
            The new scaling model; None if it stays the same.
        """
        phases = self._progress_of(job).phases
        phases.global_batch(ratio)
        curve, change = job.scaling.curve.of_one_law(), None
        if job.submitted.job != self.profiling:  # the advisor has the curve of a profile
            curve, change = curve.with_phase(phases.phase, self.settings.advisor.curve)
        if curve == job.scaling.curve:
            return None
        return Observed(job.submitted.job, replace(job.scaling, curve=curve), change, 0.0)

    def another_model(self, job: JobRecord, name: str) -> None:
        """Note that the job's script trains this model from now on."""
        self._progress_of(job).phases.another_model(name)

    def another_layout(self, job: JobRecord, name: str) -> None:
        """Note that the job uses its nodes in this layout from now on."""
        self._progress_of(job).phases.another_layout(name)

    def _progress_of(self, job: JobRecord) -> _JobProgress:
        name = job.submitted.job
        if name not in self._progress:
            phases = PhaseTracker(job.scaling.curve.phase)
            self._progress[name] = _JobProgress(Monitor(self.settings.window_s), phases)
        return self._progress[name]

    def scaled(self, job: str, nodes: int, now: float) -> list[AdvisorAnswer]:
        """Report that the job processes samples at this scale."""
        self._workers_started_at.pop(job, None)
        return self.advisor.handle(ScaleReached(job, nodes), now) if job == self.profiling else []

    def workers_started(self, job: str, now: float) -> None:
        """Note that all workers of the job's newest round have been started."""
        if job == self.profiling:
            self._workers_started_at[job] = now

    def crashed(self, job: str, nodes: int, now: float) -> list[AdvisorAnswer]:
        """Report that the script failed by itself at this scale."""
        self._workers_started_at.pop(job, None)
        return self.advisor.handle(ScriptCrashed(job, nodes), now)

    def moved(self, job: str) -> None:
        """A rescale of the job has begun. Discard the start time of its workers."""
        self._workers_started_at.pop(job, None)

    def gone(self, job: str, now: float) -> list[AdvisorAnswer]:
        """Forget a job that has ended."""
        for by_job in (
            self._requested_pool,
            self._waiting_since,
            self._workers_started_at,
            self._progress,
        ):
            by_job.pop(job, None)
        self.shared.forget(job)
        return self.advisor.handle(JobEnded(job), now)

    def limited(self, job: str, now: float) -> list[AdvisorAnswer]:
        """Withdraw the profile request of a job whose node limits have changed."""
        return self._withdraw_request(job, now) if job in self._requested_pool else []

    def forget_wish(self, job: str) -> None:
        """Allow a new profile request, because the job's profile has ended or the job waits
        again.
        """
        self._requested_pool.pop(job, None)
        self._waiting_since.pop(job, None)

    def lacks(self, job: str, current_nodes: int, now: float) -> list[AdvisorAnswer]:
        """Report that the requested nodes are no longer available. The job holds only
        ``current_nodes``.
        """
        return self.advisor.handle(NodesChanged({}, (), {job: current_nodes}), now)

    def pool_of(self, job: str) -> Pool:
        """Return the pool in the job's profile request."""
        return self._requested_pool.get(job, Pool(DEFAULT_CLASS))

    def prior_suggested(self, job: JobRecord, prior: Prior, now: float) -> list[AdvisorAnswer]:
        """A prior from other jobs is available. A pending profile starts from it; a running one
        continues from it.
        """
        return self.advisor.handle(
            PriorReceived(job.submitted.job, prior, job.submitted.profile_sizes), now
        )

    # --- inside ---

    def _withdraw_request(self, name: str, now: float) -> list[AdvisorAnswer]:
        del self._requested_pool[name]
        return self.advisor.handle(JobEnded(name), now)

    def _can_request(
        self, job: JobRecord, machine: Machine, free: Mapping[Pool, int], now: float
    ) -> bool:
        """Return whether to request the job's profile now: the nodes of its largest size are
        available, or it has waited long enough for them.
        """
        largest = max(job.sizes or (job.submitted.max_nodes,))
        current_nodes = self._usable_count(job, machine)
        suffices = current_nodes + free.get(self._pool_for(job, machine, free), 0) >= largest
        if self._incomplete(job):
            return suffices and now - (job.scaling.ended or 0.0) >= self.settings.again_s
        if suffices:
            return True
        max_wait_s = self.settings.lease_patience_s * (3 if machine.coming else 1)
        return now >= self._waiting_since[job.submitted.job] + max_wait_s

    @staticmethod
    def _incomplete(job: JobRecord) -> bool:
        """Return whether its profile lacks the largest size for want of nodes."""
        if not job.scaling.profiled or job.scaling.result != ProfileResult.PARTIAL.value:
            return False
        largest = max(job.sizes or (job.submitted.max_nodes,))
        return job.scaling.curve.largest_measured < largest

    def _request_profile(self, job: JobRecord, pool: Pool, now: float) -> list[AdvisorAnswer]:
        spec = job.submitted
        self._requested_pool[spec.job] = pool
        sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        chosen = spec.profile_sizes
        unmeasured = not job.scaling.profiled and job.scaling.curve.current.prior is None
        if chosen is None and unmeasured and len(sizes) <= self.settings.every_size_up_to:
            chosen = tuple(sizes)
        request = ProfileRequested(
            spec.job,
            spec.min_nodes,
            spec.max_nodes,
            len(job.nodes),
            job.sizes,
            chosen,
            job.scaling.curve,
            pool,
            spec.kind,
        )
        return self.advisor.handle(request, now)

    def _advisor_view(
        self, jobs: Sequence[JobRecord], machine: Machine, free: Counter[Pool], now: float
    ) -> NodesChanged:
        """Build the advisor's view of the nodes. A profile takes no node that an earlier job in the
        queue, or a starving job, needs for its minimum. While a job starves, no job donates nodes.
        """
        remaining = dict[Hashable, int](free.items())
        before_first_request = True
        for job in jobs:
            awaits_profile = self.wants(job) and not self.settings.when_worth
            before_first_request = before_first_request and not awaits_profile
            if not job.nodes and (before_first_request or job.starving) and not awaits_profile:
                pool = self._pool_for(job, machine, free)
                remaining[pool] = max(0, remaining.get(pool, 0) - int(job.smallest))
        starving = any(job.starving and not job.nodes for job in jobs)
        nodes_of_jobs = {job.submitted.job: self._usable_count(job, machine) for job in jobs}
        if self.profiling is not None:
            nodes_of_jobs.setdefault(self.profiling, 0)
        donors = (
            ()
            if starving
            else tuple(
                self._donor(job, machine) for job in jobs if self._can_donate(job, machine, now)
            )
        )
        return NodesChanged(remaining, donors, nodes_of_jobs)

    def _can_donate(self, job: JobRecord, machine: Machine, now: float) -> bool:
        return (
            bool(job.nodes)
            and not (job.rescaling or job.broken or job.guaranteed_until)
            and job.submitted.job != self.profiling
            and now >= job.rescaled_at + machine.rest_s
            and all(n in machine.usable for n in job.nodes)
        )

    @staticmethod
    def _donor(job: JobRecord, machine: Machine) -> Donor:
        return Donor(
            job.submitted.job,
            len(job.nodes),
            int(job.smallest),
            job.interrupted_at,
            job.sizes,
            machine.usable[job.nodes[0]].pool,
        )

    @staticmethod
    def _usable_count(job: JobRecord, machine: Machine) -> int:
        return sum(n in machine.usable for n in job.nodes)

    def _pool_for(self, job: JobRecord, machine: Machine, free: Mapping[Pool, int]) -> Pool:
        """Return the pool for the job's profile: that of its nodes, else that of its request, else,
        of the pools of its owner and trainer, the one with the most free nodes.
        """
        own_pool = next((machine.usable[n].pool for n in job.nodes if n in machine.usable), None)
        if own_pool is not None:
            return own_pool
        owner, trainer = job.submitted.owner, self._trainers.of(job.submitted.trainer)
        requested = self._requested_pool.get(job.submitted.job)
        # Without idle nodes it may have been requested in a class that the trainer does not have.
        if requested is not None and (trainer is None or trainer.may_use(requested.node_class)):
            return requested
        node_class = job.submitted.node_class
        usable = (
            pool
            for pool in self._trainers.usable(free, trainer)
            if pool.owner == owner and pool.is_of_class(node_class)
        )
        fallback = node_class or DEFAULT_CLASS
        if trainer is not None and not trainer.may_use(fallback):
            fallback = min(trainer.node_classes or ("",))
        return max(usable, key=lambda pool: (free[pool], pool.order), default=Pool(fallback, owner))

    def _next_tick(self, now: float) -> float | None:
        if self.profiling is not None:
            return now + 1.0
        if self._requested_pool:
            return now + 10.0
        retry_times = [
            since + self.settings.lease_patience_s * n
            for since in self._waiting_since.values()
            for n in (1, 3)
        ]
        return min(
            (t for t in retry_times if t > now), default=now + 10.0 if self._waiting_since else None
        )
