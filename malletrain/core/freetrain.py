"""FreeTrain's planning (arXiv 2106.12091, there called BFTrainer), an alternative to MalleTrain's.
Pure.

Owners state how their jobs scale; nothing is measured during training. A plan maximises the same
objective with the same exact solver. Bids differ in three ways: a start from no nodes is free, a
job that lost a node is valued as if its workers did not have to restart, and waiting guarantees no
job its minimum. Used by the daemon (``[allocation] policy``) and by the simulator. A job without a
stated curve is assumed to scale as the site's configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from malletrain.core.planning import Candidate, Plan, Solver, make_plan
from malletrain.core.pools import Pool, PoolNode
from malletrain.core.settings import ControllerSettings, PlanningSettings


def freetrain_settings(settings: ControllerSettings) -> ControllerSettings:
    """Return the settings with FreeTrain's changes: starts are free, no job is profiled, no job
    gets nodes because it has waited, and there is no minimum time between rescales.
    """
    cost = replace(settings.planning.cost, start_s=0.0)
    planning = replace(settings.planning, cost=cost)
    return replace(
        settings, planning=planning, starvation_s=math.inf, min_interval_s=0.0, profiling=None
    )


def freetrain_plan(
    candidates: Sequence[Candidate],
    nodes: Mapping[str, PoolNode],
    settings: PlanningSettings,
    favoured: Collection[Pool] = (),
    *,
    solver: Solver,
) -> Plan:
    """Return a plan in which a job that lost a node can keep its remaining size at no cost.

    Args:
        candidates: jobs that bid.
        nodes: usable nodes by name.
        settings: from :func:`freetrain_settings`.
        favoured: pools that win a tie.
        solver: decides the sizes.
    """
    bids = [c.but(broken=False) for c in candidates]
    return make_plan(bids, nodes, settings, favoured, solver=solver)
