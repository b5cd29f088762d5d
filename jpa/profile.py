"""One profile: the job that waits for it, how far it has come, and what it ends with.

Decides what was learnt by a profile that ends and how its end is reported. Which size comes next,
and when a profile ends, is decided by :mod:`jpa.advisor`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jpa.curve import CurveConfig, MeasuredCurve
from jpa.measure import MeasureConfig, ThroughputMeter
from jpa.messages import ProfileFinished, ProfileResult, ProfileWanted
from jpa.plan import PlanConfig, ProfilePlan, known


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
    """A profile ends after so many seconds, with what it has."""
    rescale_timeout_s: float = 120.0
    """A rescale that takes longer, seconds, counts as a size that cannot be used now."""
    donor_quiet_s: float = 60.0
    """A donor is left alone for so many seconds after an interruption."""
    worthwhile: float = 0.5
    """A profile starts when this share of the nodes it wants can be had."""
    patience_s: float = 60.0
    """Once it has waited for so many seconds, it starts with any usable number."""
    max_crashes: int = 3
    """So many sizes that fail end the profile."""
    max_attempts: int = 3
    """So often is a profile begun that loses its nodes."""


@dataclass
class WaitingProfile:
    """A job that waits for its profile. The tally is of its earlier attempts, when nodes were lost
    under it.
    """

    wanted: ProfileWanted
    """What is to be measured; kept up to date while it waits."""
    since: float
    """When it began to wait, seconds."""
    attempts: int = 0
    """Profiles begun that lost their nodes."""
    scale_ups: int = 0
    """Rescales to more nodes asked for so far."""
    scale_downs: int = 0
    """Rescales to fewer nodes asked for so far."""
    seconds: float = 0.0
    """Time that earlier attempts took."""
    visited: tuple[int, ...] = ()
    """Sizes measured or found silent, in order."""
    said: str = ""
    """The last reason given for the wait."""

    def finished(
        self,
        result: ProfileResult,
        reason: str,
        curve: MeasuredCurve | None = None,
        nodes: int | None = None,
    ) -> ProfileFinished:
        """The report of the end.

        Args:
            result: how it ended.
            reason: a sentence for the user.
            curve: what is known now; None: what was known before.
            nodes: where the job stands; None: where it stood before.
        """
        wanted = self.wanted
        return ProfileFinished(
            wanted.job,
            result,
            wanted.curve if curve is None else curve,
            reason,
            wanted.nodes if nodes is None else nodes,
            self.scale_ups,
            self.scale_downs,
            self.seconds,
            self.visited,
        )


@dataclass
class Profile:
    """The profile under way."""

    queued: WaitingProfile
    """The wish, with its tally."""
    plan: ProfilePlan
    """The sizes left to visit."""
    curve: MeasuredCurve
    """What is known so far."""
    started: float
    """When this attempt began, seconds."""
    target: int
    """The size at which the job is, or to which it is on its way, nodes."""
    held: int
    """Nodes the job has; those asked for count."""
    asked_at: float
    """When ``target`` was asked for, seconds."""
    meter: ThroughputMeter | None = None
    """Measures the current size; None while a rescale runs."""
    silent: tuple[int, ...] = ()
    """Sizes at which no progress was reported."""
    failed: tuple[int, ...] = ()
    """Sizes at which the script or the rescale failed."""
    measured: bool = False
    """Whether any size was measured."""

    @property
    def job(self) -> str:
        """The job being profiled."""
        return self.queued.wanted.job

    def learnt(self, config: CurveConfig) -> MeasuredCurve:
        """What was learnt: silent sizes give nothing if the job was heard at others; crashes at
        every size tried are the script's fault.
        """
        curve = self.curve
        if self.measured:
            for size in self.silent:
                curve = curve.with_measurement(size, 0.0, 0.0, self.asked_at, config)
        elif self.failed:
            curve = replace(curve, unusable=self.queued.wanted.curve.unusable)
        return curve

    def finished(
        self, now: float, reason: str, config: AdvisorConfig, result: ProfileResult | None = None
    ) -> ProfileFinished:
        """The report of the end at ``now``, seconds; without ``result`` it follows from what was
        measured.
        """
        queued, curve = self.queued, self.learnt(config.curve)
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
            largest = max(queued.visited, default=0)
            missing = [
                k
                for k in self.plan.rungs
                if k not in curve.unusable and not known(curve, k, self.plan.config.tolerance)
            ]
            above = [k for k in missing if k > largest and k not in self.failed]
            if above:
                reason = (
                    f"{reason} {above[0]} nodes could not be had: sizes above {largest} "
                    "are extrapolated."
                )
            late = now - self.started >= config.max_profile_s
            early = above or (missing and (late or self.failed))
            result = ProfileResult.PARTIAL if early else ProfileResult.MEASURED
        queued.seconds += now - self.started
        return queued.finished(result, reason, curve, self.held)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(str(k) for k in sizes)
