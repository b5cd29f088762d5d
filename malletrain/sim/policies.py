"""The policies that a simulation can run under: the product's, FreeTrain's, and what both are
measured against.

Decides how the controller is set up for each: which solver shares the nodes out, what the bids take
a change of scale to cost, and which curve the controller is given. The controller itself is the
product's in every case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal

from allocator import Allocation, Bid, RescaleCost, ScalingCurve, equal_share, fcfs
from malletrain.core.controller import Controller
from malletrain.core.freetrain import freetrain_plan
from malletrain.core.planning import Solver, exact, make_plan
from malletrain.core.settings import ControllerSettings, PlanningSettings, ProfilingSettings
from malletrain.sim.costs import CostModel
from malletrain.sim.workloads import SimJob

INSTANT_S = 1e-3
"""Debounce of a world without pauses: all that happens at one instant of the trace is one plan."""

PRODUCT_SOLVER: Solver = partial(exact, clock=perf_counter)
"""The product's solver; its time limit is kept in real time."""


@dataclass(frozen=True)
class Policy:
    """How one policy uses the controller.

    ``profiles``: which jobs are profiled while they train, and pay for it: those whose owners do
    not state the true curve (``unknown``), ``all``, or ``none``. ``published``: bids as FreeTrain
    makes them: a start is free, and a job that lost a node is valued as if it were not to be
    restarted anyway; no job gets its minimum because it waits. ``free``: rescaling and preemption
    cost nothing, in the world as in the bids, and the true curves are known.
    """

    name: str
    what: str
    solver: Solver = PRODUCT_SOLVER
    profiles: Literal["none", "unknown", "all"] = "none"
    published: bool = False
    free: bool = False

    def world(self, costs: CostModel) -> CostModel:
        """What changes of scale cost in the simulated world."""
        if not self.free:
            return costs
        return CostModel("freetrain", up_s=0.0, down_s=0.0, start_s=0.0)

    def stated(self, job: SimJob) -> ScalingCurve | None:
        """The curve that the controller is given with the job: what its owner states, None for one
        that is profiled.
        """
        if self.free:
            return job.curve
        return None if self.profiled(job) else job.stated_curve

    def profiled(self, job: SimJob) -> bool:
        """Whether the job is profiled."""
        return self.profiles == "all" or (
            self.profiles == "unknown" and job.stated_curve != job.curve
        )

    def caution(self, costs: CostModel, t_fwd_s: float, starvation_s: float) -> str | None:
        """What the product would be warned of in the world of ``costs``; None where starts are not
        valued, or taken to be free.
        """
        if self.published or self.solver is not PRODUCT_SOLVER:
            return None
        return PlanningSettings(t_fwd_s, costs.cost_for_planner()).caution(starvation_s)

    def controller(
        self, costs: CostModel, settings: ControllerSettings, *, profiling: bool = False
    ) -> Controller:
        """The product's controller under this policy in the world of ``costs`` (see :meth:`world`),
        which its plans know; the rest is as ``settings`` say. ``profiling``: some job is profiled.
        """
        cost = costs.cost_for_planner()
        if self.published:
            cost = RescaleCost(cost.up_s, cost.down_s, 0.0)
        settings = replace(settings, planning=replace(settings.planning, cost=cost))
        if costs.semantics == "freetrain":
            settings = replace(settings, debounce_s=INSTANT_S, arrival_s=0.0, min_interval_s=0.0)
        if self.published or self.free:
            settings = replace(settings, starvation_s=math.inf, min_interval_s=0.0)
        profiled = (settings.profiling or ProfilingSettings()) if profiling else None
        settings = replace(settings, profiling=profiled)
        return Controller(
            settings,
            planner=partial(freetrain_plan if self.published else make_plan, solver=self.solver),
        )


def _equal(
    bids: Sequence[Bid], capacity: Mapping[str, int], settings: PlanningSettings
) -> Allocation:
    return equal_share(bids, capacity)


def _fcfs(
    bids: Sequence[Bid], capacity: Mapping[str, int], settings: PlanningSettings
) -> Allocation:
    return fcfs(bids, capacity)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "malletrain",
            "the product: exact plans; it finds out the curves that are not known",
            profiles="unknown",
        ),
        Policy(
            "profiled",
            "the product, told no curve even where it is known",
            profiles="all",
        ),
        Policy(
            "freetrain",
            "FreeTrain: exact plans from owners' curves, starting taken to be free",
            published=True,
        ),
        Policy("equal", "equal shares, whatever the curves say", solver=_equal),
        Policy(
            "fcfs", "first come, first served: each job its largest size that fits", solver=_fcfs
        ),
        Policy("ideal", "exact plans, rescaling and preemption free", free=True, published=True),
    )
}
