"""The job profiling advisor, a state machine: ``handle(event, now) -> [answer]``.

:class:`Advisor` decides when a waiting job is profiled, at which sizes, with the nodes of which
donor, and when its profile ends. It does not move jobs (the controller carries out
:class:`~jpa.messages.SetSize`) and does not choose the job's size afterwards (the allocator does).
No I/O, no clock.

Invariants, tested with random sequences of events:

* One job is profiled at a time, and at most one donor is interrupted for it.
* A donor keeps its minimum and at least one node.
* An undisturbed profile scales up once and then only down.
* It ends within ``max_profile_s`` and one rescale.
* Jobs are served first come, first served; a job whose nodes are not available does not block the
  others.

:class:`NodeAvailability` holds the nodes that a profile can have: free nodes and donors, as the
controller last reported them. It decides which jobs may be donors now: jobs in the same pool that
were not interrupted recently. It does not choose among them (:mod:`jpa.donors`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from jpa.curve import MeasuredCurve
from jpa.donors import Donor, Offer, choose_nodes
from jpa.measure import MeasurementState, ThroughputMeter
from jpa.messages import (
    AdvisorAnswer,
    AdvisorEvent,
    AdvisorTick,
    JobEnded,
    NodesChanged,
    PointMeasured,
    PriorReceived,
    ProfileFinished,
    ProfileRequested,
    ProfileResult,
    ProfileWaiting,
    ProgressReported,
    ScaleReached,
    ScriptCrashed,
    SetSize,
)
from jpa.profile import (
    AdvisorConfig,
    Profile,
    ProfilePlan,
    WaitingProfile,
    is_known,
    new_plan,
    next_step,
)
from jpa.reuse import inherit_curve


class NodeAvailability:
    """Free nodes and donors.

    Args:
        quiet_s: time for which a donor is left alone after an interruption, seconds.
    """

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._report = NodesChanged({})
        self._interrupted_at: dict[str, float] = {}

    def update(self, report: NodesChanged) -> None:
        """Replace the last report of the controller."""
        self._report = report

    def forget(self, job: str) -> None:
        """Forget a job that has ended."""
        self._interrupted_at.pop(job, None)

    def offer(self, request: ProfileRequested, size: int, min_size: int, now: float) -> Offer:
        """Return the nodes that would bring a job to a size.

        Args:
            request: the job's request.
            size: the size to reach, nodes.
            min_size: the smallest size that is of use, nodes.
            now: the time, seconds.

        Returns:
            What is available; ``total`` 0 if ``min_size`` cannot be reached.
        """
        others = [d for d in self._report.donors if d.job != request.job and d.pool == request.pool]
        donors = [self._with_last_interruption(d) for d in others]
        quiet = [
            d
            for d in donors
            if d.last_interrupted is None or now - d.last_interrupted >= self._quiet_s
        ]
        free = self._report.free.get(request.pool, 0)
        return choose_nodes(
            max(0, size - request.nodes), free, quiet, minimum=max(0, min_size - request.nodes)
        )

    def take(self, offer: Offer, pool: Hashable, now: float) -> None:
        """Subtract an accepted offer until the next report of the controller.

        Args:
            offer: the accepted offer.
            pool: the pool of its nodes.
            now: the time, seconds.
        """
        free = dict(self._report.free)
        free[pool] = free.get(pool, 0) - offer.from_free
        donors = tuple(_without_offer(d, offer) for d in self._report.donors)
        self._report = replace(self._report, free=free, donors=donors)
        if offer.from_donor is not None:
            self._interrupted_at[offer.from_donor] = now

    def _with_last_interruption(self, donor: Donor) -> Donor:
        """Return the donor with its latest interruption, including one that the controller has not
        reported yet.
        """
        times = [
            t
            for t in (donor.last_interrupted, self._interrupted_at.get(donor.job))
            if t is not None
        ]
        return replace(donor, last_interrupted=max(times, default=None))


def _without_offer(donor: Donor, offer: Offer) -> Donor:
    """Return the donor once the offer is taken."""
    if donor.job != offer.from_donor:
        return donor
    return replace(donor, nodes=donor.nodes - offer.count)


class Advisor:
    """The state machine. Only :meth:`handle` changes it."""

    def __init__(self, config: AdvisorConfig | None = None) -> None:
        self.config = config or AdvisorConfig()
        self._active: Profile | None = None
        self._queue: list[WaitingProfile] = []
        self._availability = NodeAvailability(self.config.donor_quiet_s)
        self._handlers: dict[type, Callable[[Any, float], Iterable[AdvisorAnswer]]] = {
            ProfileRequested: self._profile_requested,
            PriorReceived: self._prior_received,
            NodesChanged: self._nodes_changed,
            ScaleReached: self._scale_reached,
            ProgressReported: self._progress_reported,
            ScriptCrashed: self._script_crashed,
            JobEnded: self._job_ended,
            AdvisorTick: self._tick,
        }

    @property
    def profiling(self) -> str | None:
        """The job being profiled."""
        return self._active.job if self._active else None

    @property
    def target(self) -> int | None:
        """The size that this job has or is being moved to, nodes. The controller does not change
        it.
        """
        return self._active.target if self._active else None

    @property
    def waiting(self) -> tuple[str, ...]:
        """Jobs that wait for a profile, in order."""
        return tuple(entry.request.job for entry in self._queue)

    def handle(self, event: AdvisorEvent, now: float) -> list[AdvisorAnswer]:
        """Process one event.

        Args:
            event: the event.
            now: the time, seconds, never before that of the last event.

        Returns:
            The answers, to be carried out in order.

        Raises:
            ValueError: if the limits of a requested profile are invalid, or the numbers of a report
                are impossible. The state is unchanged then.
        """
        answers = list(self._handlers[type(event)](event, now))
        # A report alone never allows a profile to start, and reports are frequent.
        if answers or not isinstance(event, ProgressReported):
            answers += self._start_next(now)
        return answers

    # --- events ---

    def _profile_requested(self, event: ProfileRequested, now: float) -> Iterable[AdvisorAnswer]:
        if event.job == self.profiling or event.job in self.waiting:
            return ()
        new_plan(
            event.min_nodes,
            event.max_nodes,
            MeasuredCurve(),
            allowed=event.sizes,
            requested_sizes=event.requested_sizes,
        )  # raises if the limits are invalid
        self._queue.append(WaitingProfile(event, now))
        return ()

    def _prior_received(self, event: PriorReceived, now: float) -> Iterable[AdvisorAnswer]:
        for entry in self._queue:
            if entry.request.job == event.job:
                entry.request = replace(
                    entry.request,
                    curve=entry.request.curve.with_prior(event.prior),
                    requested_sizes=event.requested_sizes,
                )
        active = self._active
        if active is not None and active.job == event.job and active.curve.current.prior is None:
            # The measurement in progress continues; smaller sizes are measured only if the prior
            # does not determine them well enough.
            request = replace(active.queue_entry.request, requested_sizes=event.requested_sizes)
            active.queue_entry.request = request
            active.curve = active.curve.with_prior(event.prior)
            active.plan = replace(
                self._plan(request, active.curve),
                last_requested=active.plan.last_requested,
                visited=active.plan.visited,
            )
        return ()

    def _nodes_changed(self, event: NodesChanged, now: float) -> Iterable[AdvisorAnswer]:
        self._availability.update(event)
        for entry in self._queue:
            nodes = event.assigned.get(entry.request.job, entry.request.nodes)
            entry.request = replace(entry.request, nodes=nodes)
        active = self._active
        if active is None:
            return ()
        active.nodes = event.assigned.get(active.job, active.nodes)
        return self._nodes_lost(active, now) if active.nodes < active.target else ()

    def _scale_reached(self, event: ScaleReached, now: float) -> Iterable[AdvisorAnswer]:
        active = self._active
        # Another size belongs to an earlier rescale; NodesChanged reports a loss of nodes.
        if (
            active is not None
            and event.job == active.job
            and active.meter is None
            and event.nodes == active.target
        ):
            active.meter = ThroughputMeter(active.target, now, self.config.measure)
        return ()

    def _progress_reported(self, event: ProgressReported, now: float) -> Iterable[AdvisorAnswer]:
        active = self._active
        if active is None or event.job != active.job:
            return ()
        if event.phase is not None and event.phase != active.curve.phase:
            active.curve, _ = active.curve.with_phase(event.phase, self.config.curve)
            if active.meter is not None:
                active.meter = ThroughputMeter(active.target, now, self.config.measure)
        if active.meter is None:
            return ()
        state = active.meter.feed(event.time, event.samples)
        return self._finish_measurement(active, state, now)

    def _script_crashed(self, event: ScriptCrashed, now: float) -> Iterable[AdvisorAnswer]:
        active = self._active
        if active is None or event.job != active.job:
            return ()
        active.curve = active.curve.with_unusable(event.nodes)
        active.failed = (*active.failed, event.nodes)
        active.plan = active.plan.with_visited(event.nodes)
        if len(active.failed) >= self.config.max_crashes:
            return self._end(active, now, "It failed too often.")
        return self._advance(active, now)

    def _job_ended(self, event: JobEnded, now: float) -> Iterable[AdvisorAnswer]:
        self._queue = [entry for entry in self._queue if entry.request.job != event.job]
        self._availability.forget(event.job)
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
        if now - active.started_at >= self.config.max_profile_s:
            return self._end(
                active, now, f"The time for a profile, {self.config.max_profile_s:g} s, is up."
            )
        if active.meter is not None:
            return self._finish_measurement(active, active.meter.state(now), now)
        if now - active.requested_at >= self.config.rescale_timeout_s:
            active.failed = (*active.failed, active.target)
            active.plan = active.plan.with_visited(active.target)
            if len(active.failed) >= self.config.max_crashes:
                return self._end(active, now, "It failed too often.")
            return self._advance(active, now)
        return ()

    # --- the active profile ---

    def _finish_measurement(
        self, active: Profile, state: MeasurementState, now: float
    ) -> Iterable[AdvisorAnswer]:
        """If the measurement of the current size is over, add it to the curve and advance."""
        meter, size = active.meter, active.target
        if meter is None or state is MeasurementState.MEASURING:
            return []
        active.meter = None
        active.plan = active.plan.with_visited(size)
        active.queue_entry.visited = (*active.queue_entry.visited, size)
        if state is MeasurementState.UNKNOWN:
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
        """Request the next size, or end the profile."""
        step = next_step(active.plan, active.curve, active.nodes)
        if step.size is None:
            return self._end(active, now, step.reason)
        return [self._request_size(active, step.size, step.reason, now)]

    def _request_size(
        self, active: Profile, size: int, reason: str, now: float, offer: Offer | None = None
    ) -> SetSize:
        """Ask the controller for ``size`` nodes; ``offer``: the source of additional nodes."""
        active.queue_entry.scale_ups += size > active.nodes
        active.queue_entry.scale_downs += size < active.nodes
        active.plan = active.plan.with_requested(size)
        active.target, active.nodes, active.meter, active.requested_at = size, size, None, now
        if offer is None:
            return SetSize(active.job, size, reason)
        return SetSize(
            active.job,
            size,
            f"{reason} {offer.reason}",
            from_free=offer.from_free,
            donor=offer.from_donor,
            take=offer.count,
        )

    def _nodes_lost(self, active: Profile, now: float) -> Iterable[AdvisorAnswer]:
        """Continue on the remaining nodes, or return the job to the queue if they are too few."""
        active.meter = None
        entry = active.queue_entry
        request = entry.request
        allowed = request.sizes or range(request.min_nodes, request.max_nodes + 1)
        if any(request.min_nodes <= k <= active.nodes for k in allowed):
            return self._advance(active, now)
        entry.attempts += 1
        reason = (
            f"The job lost nodes while it was being profiled: it has {active.nodes} and needs at "
            f"least {request.min_nodes}."
        )
        if entry.attempts >= self.config.max_attempts:
            return self._end(active, now, reason)
        curve = active.resulting_curve(self.config.curve)
        entry.request = replace(request, nodes=active.nodes, curve=curve)
        entry.seconds += now - active.started_at
        entry.waiting_since, entry.last_reason = now, reason
        self._queue.insert(0, entry)
        self._active = None
        return [ProfileWaiting(active.job, reason)]

    def _end(
        self, active: Profile, now: float, reason: str, result: ProfileResult | None = None
    ) -> Iterable[AdvisorAnswer]:
        """End the active profile; ``result``: how it ended, None: according to the measurements."""
        self._active = None
        finished = active.finish(now, reason, self.config, result)
        self._share(active.queue_entry.request, inherit_curve(finished.curve))
        return [finished]

    # --- the queue ---

    def _share(self, request: ProfileRequested, curve: MeasuredCurve) -> None:
        """Give the points of ``curve`` to the waiting jobs of the same kind as ``request``."""
        for entry in self._queue:
            other = entry.request
            if other.kind and (other.kind, other.pool) == (request.kind, request.pool):
                entry.request = replace(other, curve=other.curve.with_points_of(curve))

    def _start_next(self, now: float) -> list[AdvisorAnswer]:
        """Start the first job of the queue that can start; report why the others wait."""
        answers: list[AdvisorAnswer] = []
        for entry in list(self._queue):
            if self._active is None:
                answer = self._try_start(entry, now)
                if not isinstance(answer, ProfileWaiting):
                    self._queue.remove(entry)
                    answers.append(answer)
                    continue
                reason = answer.reason
            else:
                reason = f"Job {self._active.job} is being profiled; one profile runs at a time."
            if reason != entry.last_reason:
                entry.last_reason = reason
                answers.append(ProfileWaiting(entry.request.job, reason))
        return answers

    def _try_start(
        self, entry: WaitingProfile, now: float
    ) -> SetSize | ProfileFinished | ProfileWaiting:
        """Start a profile, end one that has nothing to measure, or report why its nodes are not
        available.
        """
        request, config = entry.request, self.config
        try:
            plan = self._plan(request, request.curve)
        except ValueError as error:  # every size is unusable; other errors were raised on arrival
            return entry.end_report(ProfileResult.UNKNOWN, str(error))
        best = next_step(plan, request.curve, request.max_nodes)
        if best.size is None:
            return entry.end_report(ProfileResult.MEASURED, best.reason)
        tolerance = plan.config.tolerance
        # The search begins at the smallest size, because it usually ends there, and a waiting job
        # is tried every few seconds.
        smallest = next(k for k in sorted(plan.sizes) if not is_known(request.curve, k, tolerance))
        is_patient = now - entry.waiting_since < config.max_wait_for_nodes_s
        min_size = (
            max(smallest, round(config.min_node_share * best.size)) if is_patient else smallest
        )
        offer = self._availability.offer(request, best.size, min_size, now)
        step = next_step(plan, request.curve, request.nodes + offer.total)
        if step.size is None or step.size < min_size:
            available = (
                request.nodes + self._availability.offer(request, best.size, smallest, now).total
            )
            if available < smallest:
                return ProfileWaiting(request.job, offer.reason)
            return ProfileWaiting(
                request.job,
                f"Only {available} of the {best.size} nodes to profile it on are available; it "
                f"waits for {min_size} until {config.max_wait_for_nodes_s:g} s have passed.",
            )
        if step.size != best.size:
            offer = self._availability.offer(request, step.size, step.size, now)
        active = Profile(
            queue_entry=entry,
            plan=plan,
            curve=request.curve,
            started_at=now,
            target=step.size,
            nodes=request.nodes,
            requested_at=now,
        )
        self._active = active
        self._availability.take(offer, request.pool, now)
        return self._request_size(
            active, step.size, step.reason, now, offer if offer.total else None
        )

    def _plan(self, request: ProfileRequested, curve: MeasuredCurve) -> ProfilePlan:
        """Return the sizes to visit. Raises ValueError if every size is unusable."""
        return new_plan(
            request.min_nodes,
            request.max_nodes,
            curve,
            allowed=request.sizes,
            requested_sizes=request.requested_sizes,
            config=self.config.plan,
        )
