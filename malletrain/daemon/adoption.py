"""Collects what agents report of jobs between the start of the daemon and its first plan.

Decides nothing about a job. A job's rounds adopt all their nodes together and would let go of a
node that reports earlier, so the newest report of each node waits here until then.
"""

from __future__ import annotations

from collections.abc import Container

from malletrain.daemon.agents import Agents
from malletrain.protocol.messages import Assignment


class Adoption:
    """Of one start of the daemon."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._assignments: dict[str, dict[str, Assignment]] = {}

    def reported(self, node: str, assignment: Assignment) -> None:
        """An agent has said Hello, and that it holds this."""
        self._assignments.setdefault(assignment.job, {})[node] = assignment

    def changed(self, node: str, assignment: Assignment) -> bool:
        """One that had said so says how it stands now. False: it had not."""
        reported = node in self._assignments.get(assignment.job, {})
        if reported:
            self._assignments[assignment.job][node] = assignment
        return reported

    def of(self, job: str) -> dict[str, Assignment]:
        """Node → what it holds of the job: those that hold it yet, and were not lost meanwhile."""
        assignments = self._assignments.get(job, {})
        agents = {node: self._agents.on(node) for node in assignments}
        return {
            node: assignments[node]
            for node, agent in agents.items()
            if agent is not None and agent.holds == job and not agent.releasing
        }

    def over(self, unfinished: Container[str]) -> list[tuple[str, str]]:
        """(node, job) where a node holds a job yet that has ended meanwhile: nobody has told it."""
        ended = [job for job in self._assignments if job not in unfinished]
        return [(node, job) for job in ended for node in self.of(job)]
