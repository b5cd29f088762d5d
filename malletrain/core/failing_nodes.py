"""Detects nodes on which several jobs in a row fail although their scripts work elsewhere. Pure.

Most failures are the job's own. A node is suspected only if, within a day, several jobs in a row
failed on it whose scripts have made steps on other nodes, and no job completed there in between.
The trials of a sweep count as one job, because one error may affect all of them. Does not decide
what follows.
"""

from __future__ import annotations

from collections.abc import Iterable

MIN_FAILED_JOBS = 3
"""Minimum number of different jobs in a row."""
MAX_FAILURE_AGE_S = 86400.0
"""Older failures are ignored."""
MAX_JOBS = 50
"""Maximum number of jobs remembered per node."""
MAX_SCRIPTS = 10_000
NODES_PER_SCRIPT = 2
"""Number of nodes remembered per script: with two, at least one is not the suspected node."""


class FailingNodes:
    """The failing nodes of one machine, since the daemon's start."""

    def __init__(self) -> None:
        self._failed: dict[str, dict[str, tuple[str, float]]] = {}
        """Node → job that failed there → its script and the time."""
        self._works: dict[str, set[str]] = {}
        """Script → nodes on which it has made steps."""
        self.findings: dict[str, str] = {}
        """Detected node → reason as a sentence. The caller deletes an entry after it has reported
        it.
        """

    def works(self, script: str, nodes: Iterable[str]) -> None:
        """Note that a job of this script makes steps on these nodes."""
        worked_on = self._works.pop(script, set())
        for node in nodes:
            if len(worked_on) == NODES_PER_SCRIPT:
                break
            worked_on.add(node)
        self._works[script] = worked_on
        while len(self._works) > MAX_SCRIPTS:
            del self._works[next(iter(self._works))]

    def done(self, nodes: Iterable[str]) -> None:
        """Note that a job has completed on these nodes."""
        for node in nodes:
            self._failed.pop(node, None)

    def failed(self, job: str, script: str, node: str, now: float) -> None:
        """Note that a worker of the job failed by itself on this node, and on no other. ``job``:
        the sweep's name for a trial.
        """
        jobs = self._failed.setdefault(node, {})
        jobs.pop(job, None)
        jobs[job] = script, now
        for old in [name for name, (_, at) in jobs.items() if now - at > MAX_FAILURE_AGE_S]:
            del jobs[old]
        while len(jobs) > MAX_JOBS:
            del jobs[next(iter(jobs))]
        credible = [name for name, (of, _) in jobs.items() if self._works.get(of, set()) - {node}]
        if len(credible) >= MIN_FAILED_JOBS:
            del self._failed[node]
            self.findings[node] = (
                f"{len(credible)} jobs failed on it within a day and none was done, of scripts "
                f"that work on other nodes: {', '.join(credible)}."
            )
