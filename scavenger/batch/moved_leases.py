"""Detects leases whose jobs are not where they were requested: a plugin or hook of the scheduler
(job_submit of Slurm, queuejob of PBS) or an operator moved them to another partition or queue.

Jobs there may not be preempted as MalleTrain relies on. So such leases leave, and for a while none
is requested. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scavenger.batch.rules import span

MOVED_PAUSE_S = 600.0
"""Time for which no lease is requested after one was moved, seconds."""


class MovedLeases:
    """Watches from poll to poll where the jobs of leases are.

    Args:
        scheduler: its name, for sentences.
        noun: its word for a partition or queue.
        table: table of the configuration that names it.
    """

    def __init__(self, scheduler: str, noun: str, table: str) -> None:
        self._scheduler, self._noun, self._table = scheduler, noun, table
        self._at = float("-inf")
        self._sentence = ""

    def look(
        self, partitions: Mapping[str, str], allowed: Collection[str], now: float
    ) -> dict[str, str]:
        """Return lease → why it has to leave.

        Args:
            partitions: lease that has not ended → the partitions or queue of its job, separated by
                commas.
            allowed: partitions or queues in which leases may run; empty: any.
            now: epoch seconds.
        """
        leave = {}
        for lease, names in sorted(partitions.items()):
            others = sorted(set(names.split(",")).difference(allowed, {""}))
            if allowed and others:
                place = f"in {self._noun} {', '.join(others)}"
                leave[lease] = f"its job is {place}, not in {', '.join(sorted(allowed))}"
                self._at = now
                self._sentence = (
                    f"lease {lease} is {place}, not in {', '.join(sorted(allowed))}, and "
                    f"{self._scheduler} may not preempt it there; exempt leases from the plugin or "
                    f"hook that moves them, or set {self._noun} in [{self._table}] to where leases "
                    "may run"
                )
        return leave

    def hold(self, now: float) -> str:
        """Return why no lease may be requested; empty if leases may be."""
        remaining_s = self._at + MOVED_PAUSE_S - now
        return f"{self._sentence} (next try in {span(remaining_s)})" if remaining_s > 0 else ""
