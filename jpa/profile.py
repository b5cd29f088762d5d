"""The state of one profile, while its job waits and while it runs.

Decides which curve a profile results in and how its end is reported. It does not decide which size
comes next and when a profile ends (:mod:`jpa.advisor`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jpa.curve import CurveConfig, MeasuredCurve
from jpa.measure import MeasureConfig, ThroughputMeter
from jpa.messages import ProfileFinished, ProfileRequested, ProfileResult
from jpa.plan import PlanConfig, ProfilePlan, is_known


@dataclass(frozen=True)
class AdvisorConfig:
    """Limits of profiles."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    """Which sizes are visited."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    """When one size has been measured."""
    curve: CurveConfig = field(default_factory=CurveConfig)
    """How measurements are weighed."""
    max_profile_s: float = 600.0
    """Maximum duration of a profile, seconds."""
    rescale_timeout_s: float = 120.0
    """Time after its request at which a rescale counts as failed, seconds."""
    donor_quiet_s: float = 60.0
    """Time for which a donor is left alone after an interruption, seconds."""
    min_node_share: float = 0.5
    """The fraction of its largest size that has to be available for a profile to start."""
    max_wait_for_nodes_s: float = 60.0
    """Maximum time to wait for ``min_node_share``, seconds. After it, the profile starts at any
    usable size.
    """
    max_crashes: int = 3
    """The number of failed sizes that ends a profile."""
    max_attempts: int = 3
    """Maximum number of starts of a profile; it starts again when its job loses nodes."""


@dataclass
class WaitingProfile:
    """A job that waits for its profile, with the totals of earlier attempts that lost their
    nodes.
    """

    request: ProfileRequested
    """The request, updated while the job waits."""
    waiting_since: float
    """Time at which it began to wait, seconds."""
    attempts: int = 0
    """Attempts that ended because the job lost nodes."""
    scale_ups: int = 0
    """Rescales to more nodes requested so far."""
    scale_downs: int = 0
    """Rescales to fewer nodes requested so far."""
    seconds: float = 0.0
    """Duration of the earlier attempts, seconds."""
    visited: tuple[int, ...] = ()
    """Sizes that were measured or gave no progress, in order."""
    last_reason: str = ""
    """The last reason reported for the wait."""

    def end_report(
        self,
        result: ProfileResult,
        reason: str,
        curve: MeasuredCurve | None = None,
        nodes: int | None = None,
    ) -> ProfileFinished:
        """Return the report of the end.

        Args:
            result: outcome of the profile.
            reason: a sentence for the user.
            curve: the resulting curve; None: that of the request.
            nodes: the job's current nodes; None: those of the request.
        """
        request = self.request
        return ProfileFinished(
            job=request.job,
            result=result,
            curve=request.curve if curve is None else curve,
            reason=reason,
            nodes=request.nodes if nodes is None else nodes,
            scale_ups=self.scale_ups,
            scale_downs=self.scale_downs,
            seconds=self.seconds,
            visited=self.visited,
        )


@dataclass
class Profile:
    """The active profile."""

    queue_entry: WaitingProfile
    """The request, with the totals of all attempts."""
    plan: ProfilePlan
    """The remaining sizes."""
    curve: MeasuredCurve
    """The curve so far."""
    started_at: float
    """Start time of this attempt, seconds."""
    target: int
    """The size that the job has or is being moved to, nodes."""
    nodes: int
    """Nodes assigned to the job, requested ones included."""
    requested_at: float
    """Time at which the advisor asked for ``target``, seconds."""
    meter: ThroughputMeter | None = None
    """Measures the current size; None during a rescale."""
    silent: tuple[int, ...] = ()
    """Sizes at which the job reported no progress."""
    failed: tuple[int, ...] = ()
    """Sizes at which the script or the rescale failed."""
    measured: bool = False
    """Whether any size has been measured."""

    @property
    def job(self) -> str:
        """The job being profiled."""
        return self.queue_entry.request.job

    def resulting_curve(self, config: CurveConfig) -> MeasuredCurve:
        """Return the curve, including what the sizes without a measurement show. If another size
        was measured, silent sizes have throughput 0. If no size was measured and one failed, the
        fault is taken to be the script's, and no size becomes unusable.
        """
        curve = self.curve
        if self.measured:
            for size in self.silent:
                curve = curve.with_measurement(size, 0.0, 0.0, self.requested_at, config)
        elif self.failed:
            curve = replace(curve, unusable=self.queue_entry.request.curve.unusable)
        return curve

    def finish(
        self, now: float, reason: str, config: AdvisorConfig, result: ProfileResult | None = None
    ) -> ProfileFinished:
        """Add this attempt to the totals of the queue entry, and return the report of the end.

        Args:
            now: the time, seconds.
            reason: a sentence for the user.
            config: limits of profiles.
            result: outcome of the profile; None: according to the measurements.
        """
        entry, curve = self.queue_entry, self.resulting_curve(config.curve)
        if self.failed:
            reason = f"{reason} Rescaling or the script failed at {_listed(self.failed)} nodes."
        if self.silent and not self.measured:
            reason = (
                f"{reason} No progress was reported, so nothing is known and the job runs "
                "with a neutral prior."
            )
        if result is None and not self.measured and (self.silent or self.failed):
            result = ProfileResult.UNKNOWN
        elif result is None:
            largest = max(entry.visited, default=0)
            missing = [
                k
                for k in self.plan.rungs
                if k not in curve.unusable and not is_known(curve, k, self.plan.config.tolerance)
            ]
            unreached_sizes = [k for k in missing if k > largest and k not in self.failed]
            if unreached_sizes:
                reason = (
                    f"{reason} {unreached_sizes[0]} nodes were not available: sizes above "
                    f"{largest} are extrapolated."
                )
            timed_out = now - self.started_at >= config.max_profile_s
            is_partial = unreached_sizes or (missing and (timed_out or self.failed))
            result = ProfileResult.PARTIAL if is_partial else ProfileResult.MEASURED
        entry.seconds += now - self.started_at
        return entry.end_report(result, reason, curve, self.nodes)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(str(k) for k in sizes)
