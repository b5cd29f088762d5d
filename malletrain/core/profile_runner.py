"""Applies the answers of the profiling advisor to the controller's state.

Decides which nodes each step of a profile takes and releases, whether a crash counts against a
size, and what is announced and stored. :mod:`malletrain.core.profiling` and the advisor decide what
is measured and when. If ``ControllerSettings.profiling`` is None, it does nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from allocator import ScalingCurve
from jpa import (
    AdvisorAnswer,
    PointMeasured,
    ProfileFinished,
    ProfileResult,
    ProfileWaiting,
    SetSize,
)
from jpa.costs import RESCALE_KINDS
from malletrain.core.commands import Announce, BatchAdvised, Command, KeepScalingModel
from malletrain.core.events import (
    BatchReported,
    JobState,
    ModelChanged,
    PriorSuggested,
    Progressed,
    RescaleCostMeasured,
    WorkersStarted,
)
from malletrain.core.goodput import best_batch, goodput
from malletrain.core.pools import Trainers
from malletrain.core.profiling import Machine, Observed, Profiler
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ControllerSettings, ProfilingSettings
from malletrain.core.state import ControllerState
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind

SPARED = "spared"
"""Result of a job whose profile would not pay. It is measured only by its progress outside a
profile.
"""
MIN_REPLAN_CHANGE = 0.1
"""Minimum relative change of an estimate by progress outside a profile that causes a new plan."""


class ProfileRunner:
    """Profiles of one controller's jobs."""

    def __init__(self, state: ControllerState, settings: ControllerSettings) -> None:
        self._state = state
        self._settings = settings
        self._on = settings.profiling is not None
        profiling = settings.profiling or ProfilingSettings()
        trainers = Trainers(settings.trainers)
        self.profiler = Profiler(profiling, settings.planning.cost, trainers)

    # --- reading ---

    def holds(self, job: JobRecord) -> bool:
        """Return whether the job is being profiled, so that only its profile changes its size."""
        return self.profiler.profiling == job.submitted.job

    def unseen(self, job: JobRecord) -> bool:
        """Return whether nothing is known of the job's throughput, and nothing will be before it
        runs. If profiles must be worth their cost, no profile starts with such a job.
        """
        careful = self._on and self.profiler.settings.when_worth
        return careful and job.curve is None and self.profiler.worth.rounds(job.submitted.job) < 3

    def next_wakeup(self) -> float | None:
        """Return the time at which :meth:`review` is due; None if it is not."""
        return self.profiler.tick_at

    # --- calls of the controller ---

    def submitted(self, job: JobRecord, scaling: ScalingModel | None) -> None:
        """Initialise the scaling model of a new job."""
        if self._on:
            self._learn(job, self.profiler.begin(scaling))

    def review(self, jobs: list[JobRecord], coming: bool, now: float) -> list[Command]:
        """Send the current state to the advisor and apply its answers. Call it before every plan
        and at :meth:`next_wakeup`. ``jobs``: the admitted jobs that may be profiled; ``coming``:
        whether more nodes are expected.
        """
        if not self._on:
            return []
        state = self._state
        for other in jobs:
            spec, own_curve = other.submitted, other.scaling.curve
            if spec.profile and not self.holds(other):
                curve = self.profiler.shared.tell(spec.job, spec.kind, own_curve)
                if curve is not own_curve:
                    self._learn(other, replace(other.scaling, curve=curve))
        machine = Machine(state.usable, state.idle, coming, self._settings.min_interval_s)
        for spared in self.profiler.spared(jobs, now):
            reason = "A profile would cost more than its result is worth in the remaining time."
            self._learn(spared, replace(spared.scaling, result=SPARED, reason=reason))
        commands = self._obey(self.profiler.review(jobs, machine, now), now)
        job = state.unfinished.get(self.profiler.profiling or "")
        if job is not None and job.broken and job.nodes and state.none_leaves(job.nodes):
            # Restart its workers on the same nodes.
            commands += self._move({job.submitted.job: job.nodes}, now)
        return commands

    def limited(self, job: JobRecord, now: float) -> list[Command]:
        """Update the bids of a job whose node limits have changed, and renew its profile request if
        it has one.
        """
        if not self._on:
            return []
        commands = self._obey(self.profiler.limited(job.submitted.job, now), now)
        return [*commands, *self._learn(job, job.scaling)]

    def ended(self, job: JobRecord, now: float, *, done: bool) -> list[Command]:
        """Record the end of a job; ``done``: whether it completed."""
        self.profiler.worth.ended(job.submitted.job, now, done=done)
        if self.holds(job):  # other jobs can use what is measured so far
            self.profiler.shared.remember(job.submitted.kind, job.scaling.curve)
        return self._obey(self.profiler.gone(job.submitted.job, now), now)

    def rescaled(self, job: JobRecord, now: float) -> list[Command]:
        """Note that the job processes samples at its newest scale."""
        name, visit = job.submitted.job, self.holds(job)
        self.profiler.worth.trains(name, len(job.nodes), now, visit=visit)
        if job.broken:
            return []
        # the first node, which receives it, may have changed
        advice = self._advice(job, again=True)
        return advice + self._obey(self.profiler.scaled(name, len(job.nodes), now), now)

    def crashed(self, job: JobRecord, now: float) -> list[Command]:
        """Report a failure of the job's script to the advisor, if the job is being profiled."""
        if not self.holds(job):
            return []
        crashed = self.profiler.crashed(job.submitted.job, len(job.nodes), now)
        return self._obey(crashed, now)

    def blames_size(self, job: JobRecord) -> bool:
        """Return whether a failure of the job's script is attributed to its size: it is being
        profiled, and its script has run at another size.
        """
        points = job.scaling.curve.current.points
        return self.holds(job) and any(p.rate > 0 and p.nodes != len(job.nodes) for p in points)

    # --- events ---

    def progressed(self, event: Progressed, now: float) -> list[Command]:
        """Pass progress to the profile, or to the observation of the running job."""
        job = self._state.unfinished.get(event.job)
        if not self._on or job is None or job.rescaling or job.broken or job.seeks_layout:
            return []
        if not job.nodes or event.nodes != len(job.nodes):
            return []
        if not all(math.isfinite(x) and x >= 0 for x in (event.time, event.samples, event.batch)):
            return []
        return self._obey(self.profiler.progressed(job, event, now), now)

    def model_changed(self, event: ModelChanged, now: float) -> list[Command]:
        """Start a new phase, because the job trains another model. Its next report shows it."""
        job = self._state.unfinished.get(event.job)
        if self._on and job is not None:
            self.profiler.another_model(job, event.name)
        return []

    def batch_reported(self, event: BatchReported, now: float) -> list[Command]:
        """Store what the script reports of its global batch, and bid with it."""
        job = self._state.unfinished.get(event.job)
        if job is None:
            return []
        before, was = job.batch, job.goodput
        batch = event.batch.after(before)
        self._state.batch_is(job, batch)
        if not self._on or batch == before:
            return []
        seen = self.profiler.batch_reported(job, batch.current / batch.base)
        if seen is not None:
            commands = self._observed(job, seen, now)
        else:
            commands = self._learn(job, job.scaling) if batch.follows_noise else []
        worth = job.goodput
        if worth is not None and (was is None or _differs(was, worth)):
            self._state.plan_soon(now + self._settings.debounce_s)
        return commands

    def another_layout(self, job: JobRecord, name: str) -> None:
        """Start a new phase, because the job uses its nodes in another layout."""
        if self._on:
            self.profiler.another_layout(job, name)

    def workers_started(self, event: WorkersStarted, now: float) -> list[Command]:
        """Note that all workers of the newest round have been started."""
        self.profiler.workers_started(event.job, now)
        return []

    def rescale_cost_measured(self, event: RescaleCostMeasured, now: float) -> list[Command]:
        """Add the measured cost of a rescale to the job's scaling model."""
        job = self._state.unfinished.get(event.job)
        if not self._on or job is None or event.kind not in RESCALE_KINDS:
            return []
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            return []
        costs = job.scaling.costs.observe(event.kind, event.seconds)
        return self._learn(job, replace(job.scaling, costs=costs))

    def prior_suggested(self, event: PriorSuggested, now: float) -> list[Command]:
        """Add a prior from other jobs to the job's scaling model."""
        job = self._state.unfinished.get(event.job)
        prior = event.scaling.curve.current.prior
        if not self._on or job is None or prior is None or job.scaling.profiled:
            return []
        curve = job.scaling.curve.with_prior(prior)
        if curve is job.scaling.curve:
            return []
        answers = self.profiler.prior_suggested(job, prior, now)
        commands = self._learn(job, replace(job.scaling, curve=curve))
        self._state.plan_soon(now + self._settings.debounce_s)
        return commands + self._obey(answers, now)

    # --- carrying out ---

    def _obey(self, answers: Iterable[AdvisorAnswer | Observed], now: float) -> list[Command]:
        commands: list[Command] = []
        todo = deque(answers)
        while todo:
            answer = todo.popleft()
            job = self._state.jobs[answer.job]
            if isinstance(answer, SetSize):
                moves, later_answers = self._resize(job, answer, now)
                commands += moves
                todo.extend(later_answers)
            elif isinstance(answer, PointMeasured):
                commands += self._measured(job, answer)
            elif isinstance(answer, ProfileFinished):
                commands += self._finished(job, answer, now)
            elif isinstance(answer, ProfileWaiting):
                if job.state is JobState.PROFILING:
                    self._state.profile_ends(job)
                    self.profiler.worth.profiled(answer.job, len(job.nodes), now)
                    self._state.plan_soon(now)
                commands.append(Announce(answer.job, EventKind.PROFILE_WAITING, answer.reason))
            else:
                commands += self._observed(job, answer, now)
        return commands

    def _resize(
        self, job: JobRecord, answer: SetSize, now: float
    ) -> tuple[list[Command], list[AdvisorAnswer]]:
        """Resize the profiled job, its donor first. A resize that is no longer possible is reported
        to the advisor as a loss of nodes.
        """
        state = self._state
        old = tuple(n for n in job.nodes if n in state.usable)
        pool = state.usable[old[0]].pool if old else self.profiler.pool_of(answer.job)
        donor = state.jobs[answer.donor] if answer.donor else None
        donated = self._gift(donor, answer.take) if donor is not None else ()
        idle = sorted(
            (n for n in state.idle if state.usable[n].pool == pool),
            key=self._longest_first,
        )
        new = (*old, *idle, *donated)[: answer.nodes]
        if len(new) < answer.nodes:
            return [], self.profiler.lacks(answer.job, len(old), now)
        commands: list[Command] = []
        changes: dict[str, tuple[str, ...]] = {}
        if job.state is not JobState.PROFILING:
            data = {
                "nodes": answer.nodes,
                "before": len(old),
                "donor": answer.donor or "",
                "taken": len(donated),
            }
            commands.append(Announce(answer.job, EventKind.PROFILE_STARTED, answer.reason, data))
            state.profile_begins(job)
        if donor is not None and donated:
            name, remaining = donor.submitted.job, donor.nodes[: -len(donated)]
            sentence = (
                f"It gives {len(donated)} of its {len(donor.nodes)} nodes to the profile "
                f"of job {answer.job}."
            )
            data = {"by": answer.job, "before": len(donor.nodes), "nodes": len(remaining)}
            commands.append(Announce(name, EventKind.NODES_DONATED, sentence, data))
            state.interrupted(donor, now)
            changes[name] = remaining
        if new == job.nodes and not job.broken:
            commands += state.assign(changes, now) if changes else []
            return commands, [] if job.rescaling else self.profiler.scaled(
                answer.job, len(new), now
            )
        return commands + self._move({**changes, answer.job: new}, now), []

    def _gift(self, donor: JobRecord, take: int) -> tuple[str, ...]:
        """Return the nodes that the donor gives: ``take`` nodes, or none if it can no longer give
        them.
        """
        if donor.rescaling or donor.broken or not self._state.none_leaves(donor.nodes):
            return ()
        return donor.nodes[-take:] if donor.accepts(len(donor.nodes) - take) else ()

    def _longest_first(self, node: str) -> tuple[bool, float, str]:
        horizon = self._state.usable[node].horizon_s
        return horizon is not None, -(horizon or 0.0), node

    def _move(self, nodes: dict[str, tuple[str, ...]], now: float) -> list[Command]:
        """Move jobs to exactly these nodes: the donor first, the profiled job last."""
        *_, name = nodes
        leaves = bool(set(self._state.jobs[name].nodes).difference(nodes[name]))
        commands = self._state.assign(nodes, now)
        if leaves:
            self._state.plan_soon(now + self._settings.debounce_s)
        self.profiler.moved(name)
        return [*commands]

    def _measured(self, job: JobRecord, answer: PointMeasured) -> list[Command]:
        m = answer.measurement
        self.profiler.worth.seen(job.scaling.curve, m.nodes, m.rate)
        self._state.forgive(job)
        has_interval = math.isfinite(m.half_width)
        spread = f"± {m.half_width:.2g}" if has_interval else "± unknown"
        size = counted(m.nodes, "node")
        sentence = f"{size}: {m.rate:.4g} {spread} samples/s, from {m.seconds:.1f} s."
        data = {
            "nodes": m.nodes,
            "rate": m.rate,
            "spread": m.half_width if has_interval else None,
            "seconds": m.seconds,
            "stable": m.stable,
        }
        commands = self._learn(job, replace(job.scaling, curve=answer.curve))
        return [Announce(answer.job, EventKind.PROFILE_POINT, sentence, data), *commands]

    def _finished(self, job: JobRecord, answer: ProfileFinished, now: float) -> list[Command]:
        self.profiler.forget_wish(answer.job)
        self.profiler.shared.remember(job.submitted.kind, answer.curve)
        result = answer.result.value
        scaling = replace(
            job.scaling,
            curve=answer.curve,
            profiled=answer.result is not ProfileResult.GONE,
            result=result,
            reason=answer.reason,
            ended=now,
        )
        self._state.profile_done(job)
        self.profiler.worth.profiled(answer.job, len(job.nodes), now)
        self._state.plan_soon(now)
        visited = ", ".join(str(k) for k in answer.visited) or "none"
        sentence = (
            f"{answer.reason} Sizes visited: {visited}; {answer.scale_ups} up, "
            f"{answer.scale_downs} down, {answer.seconds:.0f} s."
        )
        data = {
            "result": result,
            "visited": list(answer.visited),
            "scale_ups": answer.scale_ups,
            "scale_downs": answer.scale_downs,
            "seconds": answer.seconds,
        }
        return [
            *self._learn(job, scaling),
            Announce(answer.job, EventKind.PROFILE_FINISHED, sentence, data),
        ]

    def _observed(self, job: JobRecord, seen: Observed, now: float) -> list[Command]:
        if (
            not job.scaling.has_data and seen.scaling.has_data
        ):  # waiting jobs of its kind have no data either
            self.profiler.shared.remember(job.submitted.kind, seen.scaling.curve)
        commands = self._learn(job, seen.scaling)
        if seen.change is not None:
            change = seen.change
            data = {
                "change": change.kind,
                "nodes": change.nodes,
                "before": change.before,
                "after": change.after,
                "phase": change.phase,
            }
            commands.append(Announce(seen.job, EventKind.CURVE_CHANGED, change.sentence, data))
        if seen.change is not None or seen.surprise > MIN_REPLAN_CHANGE:
            self._state.plan_soon(now + self._settings.debounce_s)
        return commands

    def _learn(self, job: JobRecord, scaling: ScalingModel) -> list[Command]:
        """Store a new scaling model and bid with it. A curve that the user stated stays."""
        self._state.learn(job, scaling)
        spec, curve = job.submitted, job.curve
        if spec.curve is None:
            sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
            curve = scaling.bid_curve(sizes, self.profiler.settings.kappa)
        worth = None
        if curve is not None and job.batch is not None and job.batch.follows_noise:
            worth = goodput(curve, job.batch, scaling.curve.batch_gain)
        self._state.bid_with(job, curve, scaling.cost, worth)
        return [KeepScalingModel(spec.job, scaling), *self._advice(job)]

    def _advice(self, job: JobRecord, *, again: bool = False) -> list[Command]:
        """Return the advice on the global batch of a job whose batch follows the gradient noise, if
        it has changed or must be sent ``again``.
        """
        gain = job.scaling.curve.batch_gain
        if job.batch is None or not job.batch.follows_noise or gain is None or not job.nodes:
            return []
        size, _ = best_batch(len(job.nodes), job.batch, gain)
        if size == job.advised_batch and not again:
            return []
        self._state.advise(job, size)
        return [BatchAdvised(job.submitted.job, size)]


def _differs(before: ScalingCurve, after: ScalingCurve) -> bool:
    """Return whether the shapes of two curves differ, so that another plan may be better."""
    sizes = [k for k, rate in after.points if rate > 0 and before.at(k) > 0]
    ratios = [after.at(k) / before.at(k) for k in sizes]
    return not ratios or max(ratios) > (1 + MIN_REPLAN_CHANGE) * min(ratios)
