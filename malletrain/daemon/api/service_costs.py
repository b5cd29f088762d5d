"""What the start of a service costs in plans, and whether a node outlasts it, for views of the job.

Decides nothing: :mod:`malletrain.core.start_costs` does.
"""

from __future__ import annotations

from dataclasses import replace

from allocator import RescaleCost
from malletrain.core.pools import Pool
from malletrain.core.records import JobRecord
from malletrain.core.start_costs import LongLivedNodes
from malletrain.daemon.engine.state import SiteState


def nodes_outlast_start(state: SiteState, job: JobRecord) -> bool:
    """Return whether enough of the present nodes outlast a start of a job; True for a job that
    states no start cost.
    """
    spec = job.submitted
    if job.start is None:
        return True

    def may_use(pool: Pool) -> bool:
        return pool.owner == spec.owner and pool.is_of_class(spec.node_class)

    lasting = LongLivedNodes(state.controller.state.usable)
    return lasting.suffice(job.start, job.nodes, job.smallest, may_use)


def plan_pauses(state: SiteState, job_id: str) -> RescaleCost | None:
    """Return the pauses with which plans count for an unfinished service or farm; None for other
    jobs.
    """
    job, run = state.controller.jobs.get(job_id), state.runs.get(job_id)
    if job is None or run is None or run.spec.trains or job.cost is None:
        return None
    if job.start is None:
        return job.cost
    nodes = state.controller.nodes
    node_class = next((nodes[n].pool.node_class for n in job.nodes if n in nodes), "default")
    return replace(job.cost, start_s=job.start.on(node_class))
