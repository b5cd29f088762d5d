"""The job profiling advisor: one profile at a time, from the queue to the finished curve.
``handle(event, now) -> [answer]``.

Decides when a waiting job is profiled, at which sizes, with whose nodes, and when its profile is
over. It does not move jobs (the controller carries out :class:`~jpa.messages.SetSize`) and does not
choose the size at which the job goes on (the allocator does). No I/O, no clock.

Invariants, tested with random event sequences: one job is profiled at a time and one donor
interrupted for it; no donor falls below its minimum or its last node; a profile that is not
disturbed scales up once and then only down; it is over within ``max_profile_s`` and one rescale;
jobs are served first come, first served, but one whose nodes cannot be had does not hold up the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from jpa.curve import CurveConfig, MeasuredCurve
from jpa.donors import Offer
from jpa.measure import MeasureConfig, Outcome, ThroughputMeter
from jpa.messages import (
    AdvisorEvent,
    Answer,
    Crashed,
    Finished,
    JobGone,
    NodesChanged,
    PointMeasured,
    ProfileWanted,
    Progress,
    Result,
    Scaled,
    SetSize,
    Suggested,
    Tick,
    Waiting,
)
from jpa.plan import PlanConfig, ProfilePlan, known, new_plan, next_step
from jpa.reuse import inherited
from jpa.supply import Supply


@dataclass(frozen=True)
class AdvisorConfig:
    """Limits; times in seconds.

    ``max_profile_s``: a profile ends after this long, with what it has. ``rescale_timeout_s``: a
    rescale that takes longer counts as a size that cannot be used now. ``donor_quiet_s``: a donor
    is left alone for so long after an interruption. ``worthwhile``: a profile starts when this
    share of the nodes it wants can be had, or any usable number once it has waited ``patience_s``.
    ``max_crashes``: so many sizes that fail end the profile. ``max_attempts``: so often is a
    profile begun that loses its nodes.
    """

    plan: PlanConfig = field(default_factory=PlanConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    curve: CurveConfig = field(default_factory=CurveConfig)
    max_profile_s: float = 600.0
    rescale_timeout_s: float = 120.0
    donor_quiet_s: float = 60.0
    worthwhile: float = 0.5
    patience_s: float = 60.0
    max_crashes: int = 3
    max_attempts: int = 3


@dataclass
class _Queued:
    """A job that waits. The tally is of its earlier attempts, when nodes were lost under it."""

    wanted: ProfileWanted
    since: float
    attempts: int = 0
    scale_ups: int = 0
    scale_downs: int = 0
    seconds: float = 0.0
    visited: tuple[int, ...] = ()
    said: str = ""


@dataclass
class _Active:
    """The profile under way. ``meter`` is None while a rescale to ``target`` runs, which was asked
    for at ``asked_at``.
    """

    queued: _Queued
    plan: ProfilePlan
    curve: MeasuredCurve
    started: float
    target: int
    held: int
    asked_at: float
    meter: ThroughputMeter | None = None
    silent: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    measured: bool = False

    @property
    def job(self) -> str:
        return self.queued.wanted.job


class Advisor:
    """The state machine. Everything but :meth:`handle` only reads."""

    def __init__(self, config: AdvisorConfig | None = None) -> None:
        self.config = config or AdvisorConfig()
        self._active: _Active | None = None
        self._queue: list[_Queued] = []
        self._supply = Supply(self.config.donor_quiet_s)
        self._table: dict[type, Callable[[Any, float], Iterable[Answer]]] = {
            ProfileWanted: self._wanted,
            Suggested: self._suggested,
            NodesChanged: self._nodes_changed,
            Scaled: self._scaled,
            Progress: self._progress,
            Crashed: self._crashed,
            JobGone: self._gone,
            Tick: self._tick,
        }

    @property
    def profiling(self) -> str | None:
        """The job being profiled."""
        return self._active.job if self._active else None

    @property
    def target(self) -> int | None:
        """The size at which that job is, or to which it is on its way; the controller leaves it
        there.
        """
        return self._active.target if self._active else None

    @property
    def waiting(self) -> tuple[str, ...]:
        """Jobs that wait for a profile, in order."""
        return tuple(q.wanted.job for q in self._queue)

    def handle(self, event: AdvisorEvent, now: float) -> list[Answer]:
        """Take one event at time ``now`` (seconds, never before the last one) and return what is to
        be done, in order.

        Raises:
            ValueError: on a wish for a profile whose limits make no sense, or a report with
                impossible numbers. Nothing has changed then.
        """
        answers = list(self._table[type(event)](event, now))
        if answers or not isinstance(
            event, Progress
        ):  # reports are many, and by themselves they let nobody start
            answers += self._start_next(now)
        return answers

    # --- events ---

    def _wanted(self, event: ProfileWanted, now: float) -> Iterable[Answer]:
        if event.job == self.profiling or event.job in self.waiting:
            return ()
        new_plan(
            event.min_nodes,
            event.max_nodes,
            MeasuredCurve(),
            allowed=event.sizes,
            chosen=event.chosen,
        )  # raises on nonsense
        self._queue.append(_Queued(event, now))
        return ()

    def _suggested(self, event: Suggested, now: float) -> Iterable[Answer]:
        for queued in self._queue:
            if queued.wanted.job == event.job:
                queued.wanted = replace(
                    queued.wanted,
                    curve=queued.wanted.curve.with_prior(event.prior),
                    chosen=event.chosen,
                )
        active = self._active
        if active is not None and active.job == event.job and active.curve.current.prior is None:
            # The size being measured is measured all the same; of those below only what the belief
            # leaves open.
            wanted = replace(active.queued.wanted, chosen=event.chosen)
            active.queued.wanted, active.curve = wanted, active.curve.with_prior(event.prior)
            active.plan = replace(
                self._plan(wanted, active.curve),
                asked=active.plan.asked,
                visited=active.plan.visited,
            )
        return ()

    def _nodes_changed(self, event: NodesChanged, now: float) -> Iterable[Answer]:
        self._supply.changed(event)
        for queued in self._queue:
            held = event.held.get(queued.wanted.job, queued.wanted.nodes)
            queued.wanted = replace(queued.wanted, nodes=held)
        active = self._active
        if active is None:
            return ()
        active.held = event.held.get(active.job, active.held)
        return self._lost_nodes(active, now) if active.held < active.target else ()

    def _scaled(self, event: Scaled, now: float) -> Iterable[Answer]:
        active = self._active
        # Any other size is an old rescale's: a loss of nodes is told by NodesChanged.
        if (
            active is not None
            and event.job == active.job
            and active.meter is None
            and event.nodes == active.target
        ):
            active.meter = ThroughputMeter(active.target, now, self.config.measure)
        return ()

    def _progress(self, event: Progress, now: float) -> Iterable[Answer]:
        active = self._active
        if active is None or event.job != active.job:
            return ()
        if event.phase is not None and event.phase != active.curve.phase:
            active.curve, _ = active.curve.with_phase(event.phase, self.config.curve)
            if active.meter is not None:
                active.meter = ThroughputMeter(active.target, now, self.config.measure)
        if active.meter is None:
            return ()
        outcome = active.meter.feed(event.time, event.samples)
        return self._settle(active, outcome, now)

    def _crashed(self, event: Crashed, now: float) -> Iterable[Answer]:
        active = self._active
        if active is None or event.job != active.job:
            return ()
        active.curve = active.curve.with_unusable(event.nodes)
        active.failed = (*active.failed, event.nodes)
        active.plan = active.plan.done_with(event.nodes)
        if len(active.failed) >= self.config.max_crashes:
            return self._end(active, now, "It failed too often.")
        return self._advance(active, now)

    def _gone(self, event: JobGone, now: float) -> Iterable[Answer]:
        self._queue = [q for q in self._queue if q.wanted.job != event.job]
        self._supply.forget(event.job)
        active = self._active
        if active is None or event.job != active.job:
            return ()
        return self._end(active, now, "The job ended while it was being profiled.", Result.GONE)

    def _tick(self, event: Tick, now: float) -> Iterable[Answer]:
        active = self._active
        if active is None:
            return ()
        if now - active.started >= self.config.max_profile_s:
            return self._end(
                active, now, f"The time for a profile, {self.config.max_profile_s:g} s, is up."
            )
        if active.meter is not None:
            return self._settle(active, active.meter.outcome(now), now)
        if now - active.asked_at >= self.config.rescale_timeout_s:
            active.failed = (*active.failed, active.target)
            active.plan = active.plan.done_with(active.target)
            if len(active.failed) >= self.config.max_crashes:
                return self._end(active, now, "It failed too often.")
            return self._advance(active, now)
        return ()

    # --- the profile under way ---

    def _settle(self, active: _Active, outcome: Outcome, now: float) -> Iterable[Answer]:
        """Act on where the measurement of the current size stands."""
        meter, size = active.meter, active.target
        if meter is None or outcome is Outcome.MEASURING:
            return []
        active.meter = None
        active.plan = active.plan.done_with(size)
        active.queued.visited = (*active.queued.visited, size)
        if outcome is Outcome.UNKNOWN:
            active.silent = (*active.silent, size)
            if len(active.silent) >= 2 and not active.measured:
                return self._end(active, now, "The job reported no progress.")
            return self._advance(active, now)
        measurement = meter.measurement(now)
        active.curve = active.curve.with_measurement(
            size, measurement.rate, measurement.half_width, now, self.config.curve
        )
        active.measured = True
        return [PointMeasured(active.job, measurement, active.curve), *self._advance(active, now)]

    def _advance(self, active: _Active, now: float) -> Iterable[Answer]:
        """Go to the next size or end."""
        step = next_step(active.plan, active.curve, active.held)
        if step.size is None:
            return self._end(active, now, step.reason)
        return [self._go(active, step.size, step.reason, now)]

    def _go(
        self, active: _Active, size: int, reason: str, now: float, offer: Offer | None = None
    ) -> SetSize:
        active.queued.scale_ups += size > active.held
        active.queued.scale_downs += size < active.held
        active.plan = active.plan.asking(size)
        active.target, active.held, active.meter, active.asked_at = size, size, None, now
        if offer is None:
            return SetSize(active.job, size, reason)
        return SetSize(
            active.job,
            size,
            f"{reason} {offer.reason}",
            offer.from_free,
            offer.from_donor,
            offer.count,
        )

    def _lost_nodes(self, active: _Active, now: float) -> Iterable[Answer]:
        """Go on with the nodes left, or back to the queue when they are too few."""
        active.meter = None
        wanted = active.queued.wanted
        allowed = wanted.sizes or range(wanted.min_nodes, wanted.max_nodes + 1)
        if any(wanted.min_nodes <= k <= active.held for k in allowed):
            return self._advance(active, now)
        queued = active.queued
        queued.attempts += 1
        sentence = (
            f"The job lost nodes while it was being profiled and has {active.held} left "
            f"of at least {wanted.min_nodes}."
        )
        if queued.attempts >= self.config.max_attempts:
            return self._end(active, now, sentence)
        queued.wanted = replace(wanted, nodes=active.held, curve=self._curve(active))
        queued.seconds += now - active.started
        queued.since, queued.said = now, sentence
        self._queue.insert(0, queued)
        self._active = None
        return [Waiting(active.job, sentence)]

    def _end(
        self, active: _Active, now: float, reason: str, result: Result | None = None
    ) -> Iterable[Answer]:
        """Close the profile; without ``result`` it follows from what was measured."""
        self._active = None
        queued, curve = active.queued, self._curve(active)
        self._share(queued.wanted, inherited(curve))
        if active.failed:
            reason = f"{reason} Rescaling or the script failed at {_listed(active.failed)} nodes."
        if active.silent and not active.measured:
            reason = (
                f"{reason} No progress was reported, so nothing is known and the job runs "
                "with a neutral prior."
            )
        if result is None and not active.measured and (active.silent or active.failed):
            result = Result.UNKNOWN
        elif result is None:
            largest = max(queued.visited, default=0)
            missing = [
                k
                for k in active.plan.rungs
                if k not in curve.unusable and not known(curve, k, active.plan.config.tolerance)
            ]
            above = [k for k in missing if k > largest and k not in active.failed]
            if above:
                reason = (
                    f"{reason} {above[0]} nodes could not be had: sizes above {largest} "
                    "are extrapolated."
                )
            late = now - active.started >= self.config.max_profile_s
            result = (
                Result.PARTIAL
                if above or (missing and (late or active.failed))
                else Result.MEASURED
            )
        seconds = queued.seconds + now - active.started
        return [
            Finished(
                active.job,
                result,
                curve,
                reason,
                active.held,
                queued.scale_ups,
                queued.scale_downs,
                seconds,
                queued.visited,
            )
        ]

    def _curve(self, active: _Active) -> MeasuredCurve:
        """What was learnt: silent sizes give nothing if the job was heard at others; crashes at
        every size tried are the script's fault.
        """
        curve = active.curve
        if active.measured:
            for size in active.silent:
                curve = curve.with_measurement(size, 0.0, 0.0, active.asked_at, self.config.curve)
        elif active.failed:
            curve = replace(curve, unusable=active.queued.wanted.curve.unusable)
        return curve

    # --- the queue ---

    def _share(self, wanted: ProfileWanted, curve: MeasuredCurve) -> None:
        """Jobs of the same kind that wait need not measure what this one has."""
        for queued in self._queue:
            other = queued.wanted
            if other.kind and (other.kind, other.node_class) == (wanted.kind, wanted.node_class):
                queued.wanted = replace(other, curve=other.curve.with_points_of(curve))

    def _start_next(self, now: float) -> list[Answer]:
        """Start the first job in the queue that can be; say why the others wait."""
        answers: list[Answer] = []
        for queued in list(self._queue):
            if self._active is None:
                tried = self._try(queued, now)
                if not isinstance(tried, Waiting):
                    self._queue.remove(queued)
                    answers.append(tried)
                    continue
                reason = tried.reason
            else:
                reason = f"Job {self._active.job} is being profiled; one profile runs at a time."
            if reason != queued.said:
                queued.said = reason
                answers.append(Waiting(queued.wanted.job, reason))
        return answers

    def _try(self, queued: _Queued, now: float) -> SetSize | Finished | Waiting:
        """Start a profile, end one that has nothing to measure, or say why its nodes cannot
        be had.
        """
        wanted, config = queued.wanted, self.config
        try:
            plan = self._plan(wanted, wanted.curve)
        except ValueError as error:  # every size is unusable; anything else was refused on arrival
            return self._nothing(queued, Result.UNKNOWN, str(error))
        best = next_step(plan, wanted.curve, wanted.max_nodes)
        if best.size is None:
            return self._nothing(queued, Result.MEASURED, best.reason)
        least = min(k for k in plan.sizes if not known(wanted.curve, k, plan.config.tolerance))
        patient = now - queued.since < config.patience_s
        needed = max(least, round(config.worthwhile * best.size)) if patient else least
        offer = self._supply.offer(wanted, best.size, needed, now)
        step = next_step(plan, wanted.curve, wanted.nodes + offer.total)
        if step.size is None or step.size < needed:
            fewer = wanted.nodes + self._supply.offer(wanted, best.size, least, now).total
            if fewer < least:
                return Waiting(wanted.job, offer.reason)
            patience = f"it waits for {needed} until {config.patience_s:g} s have passed"
            return Waiting(
                wanted.job,
                f"Only {fewer} of the {best.size} nodes to profile it on can be had; {patience}.",
            )
        if step.size != best.size:
            offer = self._supply.offer(wanted, step.size, step.size, now)
        active = _Active(queued, plan, wanted.curve, now, step.size, wanted.nodes, now)
        self._active = active
        self._supply.take(offer, wanted.node_class, now)
        return self._go(active, step.size, step.reason, now, offer if offer.total else None)

    def _plan(self, wanted: ProfileWanted, curve: MeasuredCurve) -> ProfilePlan:
        """Which sizes to visit. Raises ValueError when every size is unusable."""
        return new_plan(
            wanted.min_nodes,
            wanted.max_nodes,
            curve,
            allowed=wanted.sizes,
            chosen=wanted.chosen,
            config=self.config.plan,
        )

    def _nothing(self, queued: _Queued, result: Result, reason: str) -> Finished:
        wanted = queued.wanted
        return Finished(
            wanted.job,
            result,
            wanted.curve,
            reason,
            wanted.nodes,
            queued.scale_ups,
            queued.scale_downs,
            queued.seconds,
            queued.visited,
        )


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(str(k) for k in sizes)
