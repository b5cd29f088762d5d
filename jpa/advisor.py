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
from dataclasses import replace
from typing import Any

from jpa.curve import MeasuredCurve
from jpa.donors import Offer
from jpa.measure import MeasurementState, ThroughputMeter
from jpa.messages import (
    AdvisorAnswer,
    AdvisorEvent,
    AdvisorTick,
    Crashed,
    JobGone,
    NodesChanged,
    PointMeasured,
    ProfileFinished,
    ProfileResult,
    ProfileWanted,
    ProgressSeen,
    Scaled,
    SetSize,
    Suggested,
    Waiting,
)
from jpa.plan import ProfilePlan, known, new_plan, next_step
from jpa.profile import AdvisorConfig, Profile, WaitingProfile
from jpa.reuse import inherited
from jpa.supply import Supply


class Advisor:
    """The state machine. Everything but :meth:`handle` only reads."""

    def __init__(self, config: AdvisorConfig | None = None) -> None:
        self.config = config or AdvisorConfig()
        self._active: Profile | None = None
        self._queue: list[WaitingProfile] = []
        self._supply = Supply(self.config.donor_quiet_s)
        self._table: dict[type, Callable[[Any, float], Iterable[AdvisorAnswer]]] = {
            ProfileWanted: self._wanted,
            Suggested: self._suggested,
            NodesChanged: self._nodes_changed,
            Scaled: self._scaled,
            ProgressSeen: self._progress,
            Crashed: self._crashed,
            JobGone: self._gone,
            AdvisorTick: self._tick,
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

    def handle(self, event: AdvisorEvent, now: float) -> list[AdvisorAnswer]:
        """Take one event at time ``now`` (seconds, never before the last one) and return what is to
        be done, in order.

        Raises:
            ValueError: on a wish for a profile whose limits make no sense, or a report with
                impossible numbers. Nothing has changed then.
        """
        answers = list(self._table[type(event)](event, now))
        if answers or not isinstance(
            event, ProgressSeen
        ):  # reports are many, and by themselves they let nobody start
            answers += self._start_next(now)
        return answers

    # --- events ---

    def _wanted(self, event: ProfileWanted, now: float) -> Iterable[AdvisorAnswer]:
        if event.job == self.profiling or event.job in self.waiting:
            return ()
        new_plan(
            event.min_nodes,
            event.max_nodes,
            MeasuredCurve(),
            allowed=event.sizes,
            chosen=event.chosen,
        )  # raises on nonsense
        self._queue.append(WaitingProfile(event, now))
        return ()

    def _suggested(self, event: Suggested, now: float) -> Iterable[AdvisorAnswer]:
        for queued in self._queue:
            if queued.wanted.job == event.job:
                queued.wanted = replace(
                    queued.wanted,
                    curve=queued.wanted.curve.with_prior(event.prior),
                    chosen=event.chosen,
                )
        active = self._active
        if active is not None and active.job == event.job and active.curve.current.prior is None:
            # The size being measured is measured all the same; of those below only what the prior
            # leaves open.
            wanted = replace(active.queued.wanted, chosen=event.chosen)
            active.queued.wanted, active.curve = wanted, active.curve.with_prior(event.prior)
            active.plan = replace(
                self._plan(wanted, active.curve),
                asked=active.plan.asked,
                visited=active.plan.visited,
            )
        return ()

    def _nodes_changed(self, event: NodesChanged, now: float) -> Iterable[AdvisorAnswer]:
        self._supply.changed(event)
        for queued in self._queue:
            held = event.held.get(queued.wanted.job, queued.wanted.nodes)
            queued.wanted = replace(queued.wanted, nodes=held)
        active = self._active
        if active is None:
            return ()
        active.held = event.held.get(active.job, active.held)
        return self._lost_nodes(active, now) if active.held < active.target else ()

    def _scaled(self, event: Scaled, now: float) -> Iterable[AdvisorAnswer]:
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

    def _progress(self, event: ProgressSeen, now: float) -> Iterable[AdvisorAnswer]:
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

    def _crashed(self, event: Crashed, now: float) -> Iterable[AdvisorAnswer]:
        active = self._active
        if active is None or event.job != active.job:
            return ()
        active.curve = active.curve.with_unusable(event.nodes)
        active.failed = (*active.failed, event.nodes)
        active.plan = active.plan.done_with(event.nodes)
        if len(active.failed) >= self.config.max_crashes:
            return self._end(active, now, "It failed too often.")
        return self._advance(active, now)

    def _gone(self, event: JobGone, now: float) -> Iterable[AdvisorAnswer]:
        self._queue = [q for q in self._queue if q.wanted.job != event.job]
        self._supply.forget(event.job)
        active = self._active
        if active is None or event.job != active.job:
            return ()
        return self._end(
            active, now, "The job ended while it was being profiled.", ProfileResult.GONE
        )

    def _tick(self, event: AdvisorTick, now: float) -> Iterable[AdvisorAnswer]:
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

    def _settle(
        self, active: Profile, outcome: MeasurementState, now: float
    ) -> Iterable[AdvisorAnswer]:
        """Act on where the measurement of the current size stands."""
        meter, size = active.meter, active.target
        if meter is None or outcome is MeasurementState.MEASURING:
            return []
        active.meter = None
        active.plan = active.plan.done_with(size)
        active.queued.visited = (*active.queued.visited, size)
        if outcome is MeasurementState.UNKNOWN:
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

    def _advance(self, active: Profile, now: float) -> Iterable[AdvisorAnswer]:
        """Go to the next size or end."""
        step = next_step(active.plan, active.curve, active.held)
        if step.size is None:
            return self._end(active, now, step.reason)
        return [self._go(active, step.size, step.reason, now)]

    def _go(
        self, active: Profile, size: int, reason: str, now: float, offer: Offer | None = None
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

    def _lost_nodes(self, active: Profile, now: float) -> Iterable[AdvisorAnswer]:
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
        queued.wanted = replace(wanted, nodes=active.held, curve=active.learnt(self.config.curve))
        queued.seconds += now - active.started
        queued.since, queued.said = now, sentence
        self._queue.insert(0, queued)
        self._active = None
        return [Waiting(active.job, sentence)]

    def _end(
        self, active: Profile, now: float, reason: str, result: ProfileResult | None = None
    ) -> Iterable[AdvisorAnswer]:
        """Close the profile; without ``result`` it follows from what was measured."""
        self._active = None
        finished = active.finished(now, reason, self.config, result)
        self._share(active.queued.wanted, inherited(finished.curve))
        return [finished]

    # --- the queue ---

    def _share(self, wanted: ProfileWanted, curve: MeasuredCurve) -> None:
        """Jobs of the same kind that wait need not measure what this one has."""
        for queued in self._queue:
            other = queued.wanted
            if other.kind and (other.kind, other.node_class) == (wanted.kind, wanted.node_class):
                queued.wanted = replace(other, curve=other.curve.with_points_of(curve))

    def _start_next(self, now: float) -> list[AdvisorAnswer]:
        """Start the first job in the queue that can be; say why the others wait."""
        answers: list[AdvisorAnswer] = []
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

    def _try(self, queued: WaitingProfile, now: float) -> SetSize | ProfileFinished | Waiting:
        """Start a profile, end one that has nothing to measure, or say why its nodes cannot
        be had.
        """
        wanted, config = queued.wanted, self.config
        try:
            plan = self._plan(wanted, wanted.curve)
        except ValueError as error:  # every size is unusable; anything else was refused on arrival
            return queued.finished(ProfileResult.UNKNOWN, str(error))
        best = next_step(plan, wanted.curve, wanted.max_nodes)
        if best.size is None:
            return queued.finished(ProfileResult.MEASURED, best.reason)
        tolerance = plan.config.tolerance
        # Smallest first: a job that waits is tried every few seconds.
        least = next(k for k in sorted(plan.sizes) if not known(wanted.curve, k, tolerance))
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
        active = Profile(queued, plan, wanted.curve, now, step.size, wanted.nodes, now)
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
