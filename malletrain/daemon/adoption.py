"""Collects the jobs that agents report between the start of the daemon and its first plan.

Decides nothing about a job. A job's rounds adopt all their nodes together and would release a node
that reports earlier. So the newest report of each node is held here until then.
"""

from __future__ import annotations

from collections.abc import Container

from malletrain.daemon.agents import Agents
from malletrain.protocol.messages import Assignment


class Adoption:
    """The reports of agents after one start of the daemon."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._assignments: dict[str, dict[str, Assignment]] = {}

    def record(self, node: str, assignment: Assignment) -> None:
        """Record the assignment in an agent's Hello."""
        self._assignments.setdefault(assignment.job, {})[node] = assignment

    def update(self, node: str, assignment: Assignment) -> bool:
        """Replace the recorded assignment of a node by a newer one. Returns whether there was one
        of this job.
        """
        is_recorded = node in self._assignments.get(assignment.job, {})
        if is_recorded:
            self._assignments[assignment.job][node] = assignment
        return is_recorded

    def of(self, job: str) -> dict[str, Assignment]:
        """Return node → assignment, for the nodes that still hold the job and have not been
        lost.
        """
        assignments = self._assignments.get(job, {})
        agents = {node: self._agents.on(node) for node in assignments}
        return {
            node: assignments[node]
            for node, agent in agents.items()
            if agent is not None and agent.holds == job and not agent.releasing
        }

    def ended_jobs(self, unfinished: Container[str]) -> list[tuple[str, str]]:
        """Return (node, job) of each node that still holds a job that has ended. Its agent does not
        know yet.
        """
        ended = [job for job in self._assignments if job not in unfinished]
        return [(node, job) for job in ended for node in self.of(job)]
