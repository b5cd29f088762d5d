"""Sets the gauges of the metrics from the agents, jobs and leases. Decides nothing."""

from __future__ import annotations

from collections import Counter

from malletrain.core.restraint import EVERY_NODE
from malletrain.daemon.agents import LeasedAgent
from malletrain.daemon.compose import Service
from malletrain.daemon.metrics import NODE_USES, Metrics


def show_gauges(service: Service, metrics: Metrics, since_s: float) -> None:
    """Set all gauges. ``since_s``: seconds since the last call, for counters of node-seconds and
    energy.

    Args:
        service: components of the daemon.
        metrics: the metrics.
        since_s: seconds since the last call, for counters of node-seconds and energy.
    """
    agents, watts_by_class = (
        list(service.core.agents),
        service.core.config.accounting.watts_by_class,
    )
    leased = [(agent.node, agent.node_class, use_of(agent)) for agent in agents]
    uses = Counter(use for *_, use in leased)
    metrics.nodes(*(uses[use] for use in NODE_USES))
    metrics.leased_nodes(leased)
    restraint = service.leases.restraints.now
    metrics.restrained(
        restraint.paused is not None or EVERY_NODE in restraint.drained,
        len(restraint.drained.keys() - {EVERY_NODE}),
        len(restraint.excluded),
    )
    metrics.warm(sum(agent.warm_bytes for agent in agents))
    for use in NODE_USES:
        metrics.node_seconds(use, uses[use] * since_s)
    if watts_by_class:
        nodes_by_state = Counter((agent.node_class, agent.holds is not None) for agent in agents)
        for (node_class, busy), count in nodes_by_state.items():
            if watts := watts_by_class.get(node_class):
                energy_j = count * (watts.busy if busy else watts.idle)
                metrics.energy(node_class, energy_j * since_s)
    service.leases.update_health()
    metrics.jobs(Counter(job.state.value for job in service.core.controller.jobs.values()))
    metrics.memory(service.core.agents.memory())
    now = service.core.clock.now()
    for run in service.core.runs.values():
        if run.row.started is not None:
            metrics.job(run.row.id, run.rate(now), len(run.nodes), run.monitor.total)


def use_of(agent: LeasedAgent) -> str:
    """Return the current use of a leased node, one of NODE_USES."""
    if agent.gone_at is not None:
        return "leaving"
    return "training" if agent.holds is not None else "free"
