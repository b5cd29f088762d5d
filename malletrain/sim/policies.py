"""The policies of a simulation: MalleTrain's, FreeTrain's, and the baselines of both.

Decides the setup of the controller for each policy: the solver, the rescale costs in bids, and the
curve that the controller gets. The controller itself is MalleTrain's in every case.

MalleTrain's start is work-conserving: a job begins on what there is and can grow at any time up to
its maximum. Two policies restrict that, and leave everything else to the controller:

* **gang**: a job waits until its whole request is there (:func:`gang_plan`). It runs on that number
  of nodes only, and keeps them until it ends or loses one.
* **ramp**: a job begins on its smallest size, and its maximum grows step by step while it runs
  (:class:`Ramp`): by multiplication, or by addition.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal

from allocator import Allocation, Bid, RescaleCost, ScalingCurve, equal_share, fcfs
from malletrain.core.controller import Controller
from malletrain.core.planning import (
    Candidate,
    Plan,
    Planner,
    Solver,
    exact,
    freetrain_plan,
    make_plan,
)
from malletrain.core.pools import Pool, PoolNode
from malletrain.core.settings import ControllerSettings, PlanningSettings, ProfilingSettings
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.workloads import SimJob

INSTANT_S = 1e-3
"""Debounce of a simulation without pauses: all events at one instant of the trace lead to one
plan.
"""

PRODUCT_SOLVER: Solver = partial(exact, clock=perf_counter)
"""MalleTrain's solver. Its time limit is in real time."""


@dataclass(frozen=True)
class Ramp:
    """The growth of a job's maximum size.

    Attributes:
        factor: factor on the maximum in each step.
        nodes: number of nodes that are added in each step.
        every_s: time between two steps, seconds. A job that has fewer nodes than its maximum at
            that time skips the step.
    """

    factor: float = 1.0
    nodes: int = 0
    every_s: float = 600.0

    def grown(self, job: SimJob, limit: int) -> int:
        """Return the maximum size after a step: the largest that the job accepts and the step
        allows, but at least the next larger one; ``limit`` if there is none.

        Args:
            job: the job.
            limit: its maximum size before.
        """
        allowed = math.floor(limit * self.factor) + self.nodes
        larger = [size for size in job.accepted_sizes if size > limit]
        if not larger:
            return limit
        return max((size for size in larger if size <= allowed), default=larger[0])


def gang_plan(
    candidates: Sequence[Candidate],
    nodes: Mapping[str, PoolNode],
    settings: PlanningSettings,
    favoured: Collection[Pool] = (),
    *,
    solver: Solver,
) -> Plan:
    """Return a plan in which running jobs keep their nodes, and waiting jobs share the others.

    Args:
        candidates: jobs of the plan, each with one accepted size.
        nodes: usable nodes by name.
        settings: settings of the planner.
        favoured: pools that win a tie.
        solver: decides which waiting jobs start.
    """
    bidders = [
        c.but(fixed=True) if c.nodes and not c.broken and all(n in nodes for n in c.nodes) else c
        for c in candidates
    ]
    return make_plan(bidders, nodes, settings, favoured, solver=solver)


@dataclass(frozen=True)
class Policy:
    """One policy: a setup of the controller.

    Attributes:
        name: name on the command line.
        what: description for users.
        solver: decides the sizes of jobs.
        profiles: jobs that are profiled while they train, at their own cost: those whose owners do
            not state the true curve (``unknown``), ``all``, or ``none``.
        published: whether bids are FreeTrain's: a start is free, a job that lost a node is valued
            as if it need not restart, and no job gets its minimum because it waits.
        free: whether rescales and preemptions cost nothing, in the simulation and in bids, and the
            true curves are known.
        gang: whether a job runs on its largest size or not at all.
        ramp: growth of a job's maximum size while it runs; None if it can grow to its largest size
            at any time.
    """

    name: str
    what: str
    solver: Solver = PRODUCT_SOLVER
    profiles: Literal["none", "unknown", "all"] = "none"
    published: bool = False
    free: bool = False
    gang: bool = False
    ramp: Ramp | None = None

    def world(self, costs: CostModel) -> CostModel:
        """Return the costs in the simulation."""
        if not self.free:
            return costs
        return CostModel("freetrain", up_s=0.0, down_s=0.0, start_s=0.0)

    def stated(self, job: SimJob) -> ScalingCurve | None:
        """Return the curve that the controller gets with the job: the owner's; None for a profiled
        job.
        """
        if self.free:
            return job.curve
        return None if self.profiled(job) else job.stated_curve

    def profiled(self, job: SimJob) -> bool:
        """Return whether the job is profiled."""
        return self.profiles == "all" or (
            self.profiles == "unknown" and job.stated_curve != job.curve
        )

    def limits(self, job: SimJob) -> tuple[int, int]:
        """Return the minimum and maximum size with which the job is submitted."""
        sizes = job.accepted_sizes
        if self.gang:
            return sizes[-1], sizes[-1]
        return (sizes[0], sizes[0]) if self.ramp else (job.min_nodes, job.max_nodes)

    def caution(self, costs: CostModel, t_fwd_s: float, starvation_s: float) -> str | None:
        """Return MalleTrain's warning about settings with ``costs``; None if starts have no value
        or are free.
        """
        if self.published or self.solver is not PRODUCT_SOLVER:
            return None
        return PlanningSettings(t_fwd_s, costs.cost_for_planner()).caution(starvation_s)

    def controller(
        self, costs: CostModel, settings: ControllerSettings, *, profiling: bool = False
    ) -> Controller:
        """Return MalleTrain's controller for this policy.

        Args:
            costs: costs in the simulation (see :meth:`world`), which plans know.
            settings: the other settings.
            profiling: whether any job is profiled.
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
        return Controller(settings, planner=self._planner())

    def _planner(self) -> Planner:
        if self.gang:
            return partial(gang_plan, solver=self.solver)
        return partial(freetrain_plan if self.published else make_plan, solver=self.solver)


def _equal(
    bids: Sequence[Bid[Pool]], capacity: Mapping[Pool, int], settings: PlanningSettings
) -> Allocation[Pool]:
    return equal_share(bids, capacity)


def _fcfs(
    bids: Sequence[Bid[Pool]], capacity: Mapping[Pool, int], settings: PlanningSettings
) -> Allocation[Pool]:
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
            "MalleTrain, without stated curves, even if they are known",
            profiles="all",
        ),
        Policy(
            "freetrain",
            "FreeTrain: exact plans from owners' curves, starting taken to be free",
            published=True,
        ),
        Policy("equal", "an equal division, whatever the curves say", solver=_equal),
        Policy(
            "fcfs", "first come, first served: each job its largest size that fits", solver=_fcfs
        ),
        Policy(
            "gang",
            "first come, first served: each job its largest size or nothing, and no other size "
            "later",
            solver=_fcfs,
            gang=True,
        ),
        Policy(
            "doubling",
            "exact plans; a job begins on its smallest size, and its maximum doubles every ten "
            "minutes",
            ramp=Ramp(factor=2.0),
        ),
        Policy(
            "additive",
            "exact plans; a job begins on its smallest size, and its maximum grows by one node "
            "every ten minutes",
            ramp=Ramp(nodes=1),
        ),
        Policy("ideal", "exact plans, rescaling and preemption free", free=True, published=True),
    )
}
