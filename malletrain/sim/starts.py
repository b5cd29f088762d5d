"""How a job begins and grows, in policies that MalleTrain's is compared with. Pure.

MalleTrain's start is work-conserving: a job begins on what there is and can grow at any time up to
its maximum. Two others restrict that, and leave everything else to the controller:

* **gang**: a job waits until its whole request is there (:func:`gang_plan`). It runs on that number
  of nodes only, and keeps them until it ends or loses one.
* **ramp**: a job begins on its smallest size, and its maximum grows step by step while it runs
  (:class:`Ramp`): by multiplication, or by addition.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from allocator import NodeInfo
from malletrain.core.planning import Candidate, Plan, Solver, make_plan
from malletrain.core.settings import PlanningSettings
from malletrain.sim.workloads import SimJob


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
    nodes: Mapping[str, NodeInfo],
    settings: PlanningSettings,
    favoured: Collection[str] = (),
    *,
    solver: Solver,
) -> Plan:
    """Return a plan in which running jobs keep their nodes, and waiting jobs share the others.

    Args:
        candidates: jobs of the plan, each with one accepted size.
        nodes: usable nodes by name.
        settings: settings of the planner.
        favoured: node classes that win a tie.
        solver: decides which waiting jobs start.
    """
    bidders = [
        c.but(fixed=True) if c.nodes and not c.broken and all(n in nodes for n in c.nodes) else c
        for c in candidates
    ]
    return make_plan(bidders, nodes, settings, favoured, solver=solver)
