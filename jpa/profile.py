"""A profile of a job: the plan, which sizes it visits from the largest down, and the state
while the job waits and while the profile runs.

Decides the next size of one profile from the measurements so far, the prior and the available
nodes, which curve a profile results in, and how its end is reported. It does not wait, measure or
take nodes, and does not decide when a profile ends (:mod:`jpa.advisor`).

Scaling up costs several times as much as scaling down and hardly depends on how many nodes join
(MalleTrain, arXiv 2404.15668), so a profile scales up once, to the largest size, and every further
size is smaller than the one before.

The ladder contains all sizes if they are few, else a geometric series. Where the curve bends, steps
are halved (in log2 k) while the plan has steps to spare. On straight stretches coarse steps are
enough: by the α-β law efficiency only rises as nodes are removed, so once a step down keeps the
throughput per node, all smaller sizes keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jpa.curve import CurveConfig, MeasuredCurve
from jpa.measure import MeasureConfig, ThroughputMeter
from jpa.messages import ProfileFinished, ProfileRequested, ProfileResult

_MEASURED_ONLY_TOLERANCE = 1e-9
"""A tolerance that only a measured size meets."""


@dataclass(frozen=True)
class PlanConfig:
    """Thoroughness of a profile.

    Raises:
        ValueError: if a value is out of range.
    """

    max_steps: int = 8
    """Maximum number of sizes to visit."""
    refine_steps: int = 2
    """Steps of ``max_steps`` that are reserved for finer steps where the curve bends (on long
    ladders only).
    """
    tolerance: float = 0.075
    """A size whose throughput is known this well (relative half-width of the 95 % interval) is not
    visited. It is wider than the 5 % of a measured size, because every visit costs a rescale
    (docs/profiling.md has measurements of the trade-off).
    """
    max_bend: float = 0.15
    """The curve bends where the elasticity of throughput with respect to nodes differs from 1 by
    more than this.
    """
    skip_interpolated: bool = True
    """Whether to skip a size that interpolation will determine well enough once the next smaller
    one is measured; only on straight stretches.
    """

    def __post_init__(self) -> None:
        if self.max_steps < 1 or not 0 <= self.refine_steps < self.max_steps:
            raise ValueError(
                f"A profile of {self.max_steps} steps, {self.refine_steps} of them for "
                "refinement, cannot work."
            )
        if not 0 < self.tolerance < 1 or self.max_bend <= 0:
            raise ValueError(
                f"The plan's tolerance ({self.tolerance}) is a share between 0 and 1 and its "
                f"largest bend ({self.max_bend}) above 0."
            )


@dataclass(frozen=True)
class ProfileStep:
    """The next step of a profile."""

    size: int | None
    """The size to visit; None: the profile is finished."""
    reason: str
    """A sentence for the user."""


@dataclass(frozen=True)
class ProfilePlan:
    """The plan of one profile and its progress. Immutable: a change returns a new plan."""

    sizes: tuple[int, ...]
    """Every size that the profile may visit, descending."""
    rungs: tuple[int, ...]
    """The sizes that it intends to visit, descending."""
    config: PlanConfig = field(default_factory=PlanConfig)
    """Its thoroughness."""
    last_requested: int | None = None
    """The last size requested, None before the first."""
    visited: tuple[int, ...] = ()
    """Sizes that have been measured or have failed, in order."""

    def with_requested(self, size: int) -> ProfilePlan:
        """Return the plan after a request for ``size``; it requests no larger sizes."""
        return replace(self, last_requested=size)

    def with_visited(self, size: int) -> ProfilePlan:
        """Return the plan after ``size`` has been measured or has failed."""
        return replace(self, visited=(*self.visited, size))


def sizes_between(
    min_nodes: int, max_nodes: int, allowed: Iterable[int] | None = None
) -> tuple[int, ...]:
    """Return the allowed sizes in [min_nodes, max_nodes], descending.

    Args:
        min_nodes: minimum number of nodes, 1 or more.
        max_nodes: maximum number of nodes.
        allowed: sizes that the job accepts, None for all.

    Raises:
        ValueError: if the limits are invalid or no allowed size lies between them.
    """
    if not 1 <= min_nodes <= max_nodes:
        raise ValueError(
            f"A job of {min_nodes} to {max_nodes} nodes cannot be profiled; give 1 <= minimum "
            "<= maximum."
        )
    if allowed is None:
        return tuple(range(max_nodes, min_nodes - 1, -1))
    sizes = tuple(sorted({k for k in allowed if min_nodes <= k <= max_nodes}, reverse=True))
    if not sizes:
        raise ValueError(
            f"None of the sizes {sorted(set(allowed))} lies between {min_nodes} and {max_nodes} "
            "nodes."
        )
    return sizes


def ladder(
    min_nodes: int, max_nodes: int, allowed: Iterable[int] | None = None, *, max_steps: int = 8
) -> tuple[int, ...]:
    """Return the sizes to visit, descending: all if they are at most ``max_steps``, else a series
    about evenly spaced in log2 that contains both ends.

    Args:
        min_nodes: minimum number of nodes, 1 or more.
        max_nodes: maximum number of nodes.
        allowed: sizes that the job accepts, None for all.
        max_steps: maximum number of sizes to visit.

    Raises:
        ValueError: as :func:`sizes_between`.
    """
    return _rungs(sizes_between(min_nodes, max_nodes, allowed), max_steps)


def new_plan(
    min_nodes: int,
    max_nodes: int,
    curve: MeasuredCurve,
    *,
    allowed: Iterable[int] | None = None,
    requested_sizes: Sequence[int] | None = None,
    config: PlanConfig | None = None,
) -> ProfilePlan:
    """Return the plan for a job.

    Args:
        min_nodes: minimum number of nodes, 1 or more.
        max_nodes: maximum number of nodes.
        curve: the job's curve so far; sizes at which it crashed are left out.
        allowed: sizes that the job accepts, None for all.
        requested_sizes: the user's own ladder (``--profile-sizes``). Within the limits all of it is
            visited, except sizes that are already measured. None: the plan chooses.
        config: thoroughness of the profile.

    Raises:
        ValueError: as :func:`sizes_between`, or if every size is unusable.
    """
    config = config or PlanConfig()
    sizes = tuple(
        k for k in sizes_between(min_nodes, max_nodes, allowed) if k not in curve.unusable
    )
    if not sizes:
        raise ValueError(
            f"The script crashed at every size from {min_nodes} to {max_nodes} nodes; nothing "
            "is left to profile."
        )
    if requested_sizes is not None:
        requested = set(requested_sizes)
        rungs = tuple(k for k in sizes if k in requested)
        if not rungs:
            raise ValueError(
                f"None of the sizes to profile, {sorted(requested)}, can be used between "
                f"{min_nodes} and {max_nodes} nodes."
            )
        return ProfilePlan(
            rungs,
            rungs,
            replace(config, tolerance=_MEASURED_ONLY_TOLERANCE, skip_interpolated=False),
        )
    all_fit = len(sizes) <= config.max_steps
    return ProfilePlan(
        sizes, sizes if all_fit else _rungs(sizes, config.max_steps - config.refine_steps), config
    )


def next_size(plan: ProfilePlan, curve: MeasuredCurve, nodes_available: int) -> int | None:
    """Return the size to visit next, as :func:`next_step`.

    Args:
        plan: the plan and its progress.
        curve: the job's curve so far.
        nodes_available: nodes that the job can have, its own included.

    Returns:
        Nodes; None if the profile is finished.
    """
    return next_step(plan, curve, nodes_available).size


def next_step(plan: ProfilePlan, curve: MeasuredCurve, nodes_available: int) -> ProfileStep:
    """Return the next step of a profile.

    Args:
        plan: the plan and its progress.
        curve: the job's curve so far.
        nodes_available: nodes that the job can have, its own included.
    """
    usable = [
        k
        for k in plan.sizes
        if k <= nodes_available and k not in curve.unusable and k not in plan.visited
    ]
    last = plan.last_requested
    if last is not None:
        done = last in plan.visited or last in curve.unusable
        usable = [k for k in usable if (k < last if done else k <= last)]
        lost_nodes = not done and nodes_available < last
    if not usable:
        if not plan.visited and last is None:
            return ProfileStep(
                None,
                f"The job needs {plan.sizes[-1]} nodes or more; {nodes_available} "
                f"{'is' if nodes_available == 1 else 'are'} available.",
            )
        return ProfileStep(None, "Every size that can be reached by scaling down has been visited.")
    rungs = [k for k in plan.rungs if k in usable]
    if last is None or lost_nodes:
        # The job will be at the largest size that it can have, so this one is measured even if it
        # is no rung.
        rungs = sorted({*rungs, _largest_unknown(plan, usable, curve)}, reverse=True)
        reason = (
            "the largest size available"
            if last is None
            else "the largest size that the remaining nodes allow"
        )
    else:
        rungs = _refined(plan, rungs, usable, curve)
        reason = "the next size down"
    for i, size in enumerate(rungs):
        if is_known(curve, size, plan.config.tolerance):
            continue
        if i + 1 < len(rungs) and _will_be_interpolated(plan, curve, size, rungs[i + 1]):
            continue
        return ProfileStep(size, f"{size} node{'s' if size != 1 else ''}: {reason}.")
    if plan.config.tolerance == _MEASURED_ONLY_TOLERANCE:
        return ProfileStep(None, "Every size that was asked for has been measured.")
    return ProfileStep(None, f"Every size is known to within {plan.config.tolerance:.1%}.")


def is_known(curve: MeasuredCurve, size: int, tolerance: float) -> bool:
    """Return whether ``size`` needs no measurement.

    Args:
        curve: the job's curve.
        size: nodes.
        tolerance: relative half-width of the 95 % interval within which an estimate suffices.
    """
    return not curve.uncertain((size,), tolerance)


def elasticity(curve: MeasuredCurve, low: int, high: int) -> float | None:
    """Return the elasticity of throughput with respect to nodes, d ln throughput / d ln nodes.

    Args:
        curve: the job's curve.
        low: the smaller size.
        high: the larger size.

    Returns:
        The mean between the two sizes: 1 on a straight curve, 0 on a plateau. None if a throughput
        is 0.
    """
    low_rate, high_rate = curve.estimate(low)[0], curve.estimate(high)[0]
    if low_rate <= 0 or high_rate <= 0:
        return None
    return math.log(high_rate / low_rate) / math.log(high / low)


def _rungs(sizes: Sequence[int], steps: int) -> tuple[int, ...]:
    """Return at most ``steps`` of ``sizes`` (descending), about evenly spaced in log2."""
    if len(sizes) <= steps:
        return tuple(sizes)
    top, bottom = sizes[0], sizes[-1]
    if steps < 2:
        return (top,)
    targets = [top * (bottom / top) ** (i / (steps - 1)) for i in range(steps)]
    # Distances between sizes are ratios, not differences.
    return tuple(
        sorted(
            {
                min(sizes, key=lambda k, t=t: (abs(math.log(k / t)), k))  # type: ignore[misc]
                for t in targets
            },
            reverse=True,
        )
    )


def _largest_unknown(plan: ProfilePlan, usable: Sequence[int], curve: MeasuredCurve) -> int:
    """Return the largest usable size that is not known; the largest of all if all are known."""
    return next((k for k in usable if not is_known(curve, k, plan.config.tolerance)), usable[0])


def _last_elasticity(plan: ProfilePlan, curve: MeasuredCurve) -> float | None:
    """Return the elasticity between the two smallest sizes measured at or above the last one
    requested; None if there are fewer than two.
    """
    above = [
        k
        for k in curve.measured_sizes
        if plan.last_requested is not None and k >= plan.last_requested and curve.estimate(k)[0] > 0
    ]
    return elasticity(curve, above[0], above[1]) if len(above) >= 2 else None


def _refined(
    plan: ProfilePlan, rungs: list[int], usable: Sequence[int], curve: MeasuredCurve
) -> list[int]:
    """Return the remaining rungs. If the curve bends and the plan has steps to spare, they get one
    more halfway to the first.
    """
    slope, last = _last_elasticity(plan, curve), plan.last_requested
    if not rungs or slope is None or abs(1 - slope) <= plan.config.max_bend or last is None:
        return rungs
    if len(plan.visited) + len(rungs) >= plan.config.max_steps:
        return rungs
    between = [k for k in usable if rungs[0] < k < last]
    if not between:
        return rungs
    middle = math.sqrt(rungs[0] * last)
    return [min(between, key=lambda k: (abs(math.log(k / middle)), k)), *rungs]


def _will_be_interpolated(
    plan: ProfilePlan, curve: MeasuredCurve, size: int, next_rung: int
) -> bool:
    """Return whether a measurement at ``next_rung`` will determine ``size`` well enough by
    interpolation.
    """
    slope = _last_elasticity(plan, curve)
    if (
        not plan.config.skip_interpolated
        or plan.last_requested is None
        or (slope is None and curve.current.prior is None)
    ):
        return False
    if slope is not None and abs(1 - slope) > plan.config.max_bend:
        return False
    rate = curve.estimate(next_rung)[0]
    if rate <= 0:
        return False
    # A visit usually ends with an interval well within the tolerance; assume half of it.
    assumed = curve.with_measurement(next_rung, rate, plan.config.tolerance / 2 * rate, 0.0)
    return assumed.relative_half_width(size) <= plan.config.tolerance


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
                size = unreached_sizes[0]
                nodes = "1 node was" if size == 1 else f"{size} nodes were"
                reason = f"{reason} {nodes} not available: sizes above {largest} are extrapolated."
            timed_out = now - self.started_at >= config.max_profile_s
            is_partial = unreached_sizes or (missing and (timed_out or self.failed))
            result = ProfileResult.PARTIAL if is_partial else ProfileResult.MEASURED
        entry.seconds += now - self.started_at
        return entry.end_report(result, reason, curve, self.nodes)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(str(k) for k in sizes)
