"""When a closed connection is the loss of a node. Pure.

The connection of an agent may end although the agent lives: it comes back in a moment. Where the
workers on another node of its job die of a lost peer as well, two connections were closed by
different kernels, and nobody waits for the agent or for what the main scheduler says.
"""

from __future__ import annotations

from collections.abc import Iterable

from malletrain.daemon.agents import Agents, LeasedAgent
from malletrain.daemon.job_repository import ActiveJob
from malletrain.protocol.failures import secondary
from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase


def of_a_peer(said: Assignment) -> bool:
    """Whether the workers on a node died of, or gave up because of, a lost peer."""
    if said.phase is AssignmentPhase.LOST:
        return True
    failed = said.phase is AssignmentPhase.FAILED and said.failures
    return bool(failed) and all(secondary(f) and f.exitcode > 0 for f in said.failures)


def lost_to_peers(agents: Agents, runs: Iterable[ActiveJob]) -> list[LeasedAgent]:
    """The agents whose connection ended and whose peers lost them, too, in the newest round."""
    found = []
    for run in runs:
        if run.bereft and run.bereft == run.rounds.generation:
            members = (agents.on(node) for node in run.rounds.members)
            found += [a for a in members if a is not None and a.unreachable_since is not None]
    return found
