"""Which sizes a profile visits, from the largest down.

Decides the next size of one profile from what is measured so far, what a prior suggests, and the
nodes there are. It does not wait, measure or take nodes (:mod:`jpa.advisor`). Scaling up costs
several times what scaling down does and hardly depends on how many nodes join (MalleTrain, arXiv
2404.15668), so a profile scales up once, to the largest size, and every further size is smaller
than the one before.

The ladder: all sizes if few, else a geometric one. While the curve bends, the steps are halved (in
log2 k) as long as steps are left: by the α-β law efficiency can only rise as nodes are taken away,
so once a step down keeps the throughput per node, all smaller sizes will, and coarse steps are
enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jpa.curve import MeasuredCurve

_MEASURED_ONLY = 1e-9
"""A tolerance that only a measured size meets."""


@dataclass(frozen=True)
class PlanConfig:
    """How thorough a profile is."""

    max_steps: int = 8
    """Sizes visited at most."""
    refine_steps: int = 2
    """Of these, kept back for finer steps where the curve bends (used on long ladders only)."""
    tolerance: float = 0.075
    """A size known this well (half-width of the 95 % interval, relative) is not visited. Wider
    than the 5 % of a measured size, because every visit costs a rescale (docs/profiling.md has the
    trade measured).
    """
    bend: float = 0.15
    """The curve bends where the elasticity of throughput to nodes differs from 1 by more."""
    bridge: bool = True
    """Also pass over a size that the next smaller one, once measured, will pin down by
    interpolation; only on straight stretches.
    """

    def __post_init__(self) -> None:
        if self.max_steps < 1 or not 0 <= self.refine_steps < self.max_steps:
            raise ValueError(
                f"A profile of {self.max_steps} steps, {self.refine_steps} of them for "
                "refinement, cannot work."
            )
        if not 0 < self.tolerance < 1 or self.bend <= 0:
            raise ValueError(
                f"The plan's tolerance ({self.tolerance}) is a share between 0 and 1 and its "
                f"bend ({self.bend}) above 0."
            )


@dataclass(frozen=True)
class ProfileStep:
    """What the profile does next: visit ``size``, or end (``size`` None). ``reason`` is for the
    user.
    """

    size: int | None
    reason: str


@dataclass(frozen=True)
class ProfilePlan:
    """One profile under way."""

    sizes: tuple[int, ...]
    """Every size it may visit, descending."""
    rungs: tuple[int, ...]
    """Those it intends to visit, descending."""
    config: PlanConfig = field(default_factory=PlanConfig)
    """How thorough it is."""
    asked: int | None = None
    """The last size asked for, None before the first."""
    visited: tuple[int, ...] = ()
    """Sizes done with (measured, or given up), in order."""

    def asking(self, size: int) -> ProfilePlan:
        """The plan once ``size`` has been asked for; no larger one will be."""
        return replace(self, asked=size)

    def done_with(self, size: int) -> ProfilePlan:
        """The plan once ``size`` has been measured or given up."""
        return replace(self, visited=(*self.visited, size))


def sizes_between(
    min_nodes: int, max_nodes: int, allowed: Iterable[int] | None = None
) -> tuple[int, ...]:
    """Allowed sizes in [min, max], descending.

    Raises:
        ValueError: when the limits make no sense or no allowed size lies between them.
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
    """Sizes to visit, descending: all if at most ``max_steps``, else about evenly spaced in log2
    with both ends.

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
    chosen: Sequence[int] | None = None,
    config: PlanConfig | None = None,
) -> ProfilePlan:
    """A plan for a job of ``min_nodes`` to ``max_nodes``. Sizes at which it crashed before are left
    out.

    ``allowed``: sizes the job accepts, None for all. ``chosen``: the user's own ladder
    (``--profile-sizes``); it is taken as it is, within the limits, and only what is measured
    already is passed over.

    Raises:
        ValueError: as :func:`sizes_between`, or when every size is unusable.
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
    if chosen is not None:
        wanted = set(chosen)
        rungs = tuple(k for k in sizes if k in wanted)
        if not rungs:
            raise ValueError(
                f"None of the sizes to profile, {sorted(set(chosen))}, can be used between "
                f"{min_nodes} and {max_nodes} nodes."
            )
        return ProfilePlan(rungs, rungs, replace(config, tolerance=_MEASURED_ONLY, bridge=False))
    few = len(sizes) <= config.max_steps
    return ProfilePlan(
        sizes, sizes if few else _rungs(sizes, config.max_steps - config.refine_steps), config
    )


def next_size(plan: ProfilePlan, measured: MeasuredCurve, nodes_available: int) -> int | None:
    """The size to visit next with ``nodes_available`` nodes (the job's own included), or None when
    the profile is finished.
    """
    return next_step(plan, measured, nodes_available).size


def next_step(plan: ProfilePlan, measured: MeasuredCurve, nodes_available: int) -> ProfileStep:
    """As :func:`next_size`, with the reason in words."""
    usable = [
        k
        for k in plan.sizes
        if k <= nodes_available and k not in measured.unusable and k not in plan.visited
    ]
    asked = plan.asked
    if asked is not None:
        done = asked in plan.visited or asked in measured.unusable
        usable = [k for k in usable if (k < asked if done else k <= asked)]
        lost_nodes = not done and nodes_available < asked
    if not usable:
        if not plan.visited and asked is None:
            return ProfileStep(
                None, f"The job needs {plan.sizes[-1]} nodes or more; {nodes_available} can be had."
            )
        return ProfileStep(None, "Every size that can be reached by scaling down has been visited.")
    rungs = [k for k in plan.rungs if k in usable]
    if asked is None or lost_nodes:
        # The job is, or will be, at the largest size it can have: that one is measured, whether it
        # is a rung or not.
        rungs = sorted({*rungs, _first(plan, usable, measured)}, reverse=True)
        why = (
            "the largest size that can be had"
            if asked is None
            else "the largest size that the nodes left allow"
        )
    else:
        rungs = _refined(plan, rungs, usable, measured)
        why = "the next size down"
    for i, size in enumerate(rungs):
        if known(measured, size, plan.config.tolerance):
            continue
        if i + 1 < len(rungs) and _bridged(plan, measured, size, rungs[i + 1]):
            continue
        return ProfileStep(size, f"{size} node{'s' if size != 1 else ''}: {why}.")
    if plan.config.tolerance == _MEASURED_ONLY:
        return ProfileStep(None, "Every size that was asked for has been measured.")
    return ProfileStep(None, f"Every size is known to within {plan.config.tolerance:.1%}.")


def known(curve: MeasuredCurve, size: int, tolerance: float) -> bool:
    """Whether ``size`` need not be measured: it was, or the curve gives it to within
    ``tolerance``.
    """
    return not curve.uncertain((size,), tolerance)


def elasticity(curve: MeasuredCurve, low: int, high: int) -> float | None:
    """d ln throughput / d ln nodes between two sizes: 1 on a straight curve, 0 on a plateau. None
    where a throughput is 0.
    """
    low_rate, high_rate = curve.estimate(low)[0], curve.estimate(high)[0]
    if low_rate <= 0 or high_rate <= 0:
        return None
    return math.log(high_rate / low_rate) / math.log(high / low)


def _rungs(sizes: Sequence[int], steps: int) -> tuple[int, ...]:
    if len(sizes) <= steps:
        return tuple(sizes)
    top, bottom = sizes[0], sizes[-1]
    if steps < 2:
        return (top,)
    targets = [top * (bottom / top) ** (i / (steps - 1)) for i in range(steps)]
    # Ratios, not differences, say which allowed size is nearest.
    return tuple(
        sorted(
            {
                min(sizes, key=lambda k, t=t: (abs(math.log(k / t)), k))  # type: ignore[misc]
                for t in targets
            },
            reverse=True,
        )
    )


def _first(plan: ProfilePlan, usable: Sequence[int], measured: MeasuredCurve) -> int:
    """The largest size worth a visit; the largest of all where none is."""
    return next((k for k in usable if not known(measured, k, plan.config.tolerance)), usable[0])


def _last_slope(plan: ProfilePlan, measured: MeasuredCurve) -> float | None:
    """Elasticity between the two smallest sizes measured at or above the last one asked for; None
    before there are two.
    """
    above = [
        k
        for k in measured.measured_sizes
        if plan.asked is not None and k >= plan.asked and measured.estimate(k)[0] > 0
    ]
    return elasticity(measured, above[0], above[1]) if len(above) >= 2 else None


def _refined(
    plan: ProfilePlan, rungs: list[int], usable: Sequence[int], measured: MeasuredCurve
) -> list[int]:
    """The rungs left, with one more halfway to the next where the curve bends and steps are
    left.
    """
    slope = _last_slope(plan, measured)
    if not rungs or slope is None or abs(1 - slope) <= plan.config.bend or plan.asked is None:
        return rungs
    if len(plan.visited) + len(rungs) >= plan.config.max_steps:
        return rungs
    between = [k for k in usable if rungs[0] < k < plan.asked]
    if not between:
        return rungs
    middle = math.sqrt(rungs[0] * plan.asked)
    return [min(between, key=lambda k: (abs(math.log(k / middle)), k)), *rungs]


def _bridged(plan: ProfilePlan, measured: MeasuredCurve, size: int, below: int) -> bool:
    """Whether measuring ``below`` will pin ``size`` down, so that it need not be visited."""
    slope = _last_slope(plan, measured)
    if (
        not plan.config.bridge
        or plan.asked is None
        or (slope is None and measured.current.prior is None)
    ):
        return False
    if slope is not None and abs(1 - slope) > plan.config.bend:
        return False
    rate = measured.estimate(below)[0]
    if rate <= 0:
        return False
    # As if it were measured about as well as a step ends: well inside the tolerance.
    supposed = measured.with_measurement(below, rate, plan.config.tolerance / 2 * rate, 0.0)
    return supposed.relative_half_width(size) <= plan.config.tolerance
