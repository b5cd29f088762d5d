"""Decides whether a closed connection means the loss of a node. Pure.

An agent's connection may end while the agent lives; the agent reconnects soon. But if workers on
another node of its job fail at the same time because of a lost peer, connections to two hosts have
been closed, and the node counts as lost at once. This does not apply if workers of the job failed
by themselves, because then others report a lost peer, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from malletrain.daemon.agents import Agents, LeasedAgent
from malletrain.daemon.job_repository import ActiveJob
from malletrain.protocol.failures import no_way, secondary
from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.failure_grace import LAST_RESORT_CODE


def of_a_peer(assignment: Assignment) -> bool:
    """Whether the workers on a node died or gave up because of a lost peer."""
    if assignment.phase is AssignmentPhase.LOST:
        return True
    failed = assignment.phase is AssignmentPhase.FAILED and assignment.failures
    return bool(failed) and all(secondary(f) and f.exitcode > 0 for f in assignment.failures)


def note(run: ActiveJob, node: str, assignment: Assignment) -> None:
    """Record the cause of the failure of the workers on ``node``.

    Args:
        run: the job.
        node: name of the node.
        assignment: state of the job on the node.
    """
    if of_a_peer(assignment):
        run.bereft[node] = assignment.generation
    elif assignment.phase is AssignmentPhase.FAILED and any(map(_by_itself, assignment.failures)):
        run.crashed = max(run.crashed, assignment.generation)
    if any(no_way(f.tail) for f in assignment.failures):
        run.barred = max(run.barred, assignment.generation)


def _by_itself(failure: Failure) -> bool:
    """Whether the loss of a node, its own or a peer's, does not explain the death of a worker."""
    return failure.exitcode not in (-9, LAST_RESORT_CODE) and not secondary(failure)


def lost_to_peers(agents: Agents, runs: Iterable[ActiveJob]) -> list[LeasedAgent]:
    """Return the agents whose connection ended and whose peers report a loss in the newest round.
    An agent that reports a lost peer itself is not the lost one.
    """
    lost_agents = []
    for run in runs:
        if not run.bereft:
            continue
        newest = run.rounds.generation
        bereft = {node for node, generation in run.bereft.items() if generation == newest}
        if newest and bereft and run.crashed != newest:
            members = (agents.on(n) for n in run.rounds.members if n not in bereft)
            lost_agents += [a for a in members if a is not None and a.unreachable_since is not None]
    return lost_agents
