"""Nodes on which one job after another fails although the same scripts work elsewhere. Pure.

Most failures are the job's own. A node is suspected only if, within a day, jobs whose scripts have
made steps on other nodes failed on it one after the other, and none completed there in between. The
trials of a sweep count as one job, because one error may affect all of them. Decides nothing about
what follows.
"""

from __future__ import annotations

from collections.abc import Iterable

JOBS = 3
"""So many different jobs in a row."""
WITHIN_S = 86400.0
"""What failed longer ago counts no more."""
MOST_JOBS = 50
"""Jobs remembered of a node."""
MOST_SCRIPTS = 10_000
ENOUGH = 2
"""Nodes remembered of a script: one of them is another than the one in question."""


class FailingNodes:
    """Of one machine, since the daemon's start."""

    def __init__(self) -> None:
        self._failed: dict[str, dict[str, tuple[str, float]]] = {}
        """Node → job that failed there → its script, and when."""
        self._works: dict[str, set[str]] = {}
        """Script → nodes on which it has made steps."""
        self.findings: dict[str, str] = {}
        """Node → why, as a sentence, of those that were found out; to be deleted once told."""

    def works(self, script: str, nodes: Iterable[str]) -> None:
        """A job of this script makes steps on these nodes."""
        worked_on = self._works.pop(script, set())
        for node in nodes:
            if len(worked_on) == ENOUGH:
                break
            worked_on.add(node)
        self._works[script] = worked_on
        while len(self._works) > MOST_SCRIPTS:
            del self._works[next(iter(self._works))]

    def done(self, nodes: Iterable[str]) -> None:
        """A job has ended well on these nodes."""
        for node in nodes:
            self._failed.pop(node, None)

    def failed(self, job: str, script: str, node: str, now: float) -> None:
        """A worker of the job (or of a trial of the sweep of this name) failed on this node by
        itself, and on no other.
        """
        jobs = self._failed.setdefault(node, {})
        jobs.pop(job, None)
        jobs[job] = script, now
        for old in [name for name, (_, at) in jobs.items() if now - at > WITHIN_S]:
            del jobs[old]
        while len(jobs) > MOST_JOBS:
            del jobs[next(iter(jobs))]
        sound = [name for name, (of, _) in jobs.items() if self._works.get(of, set()) - {node}]
        if len(sound) >= JOBS:
            del self._failed[node]
            self.findings[node] = (
                f"{len(sound)} jobs failed on it within a day and none was done, of scripts that "
                f"work on other nodes: {', '.join(sound)}."
            )
