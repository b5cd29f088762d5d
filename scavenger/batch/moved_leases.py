"""Detects leases whose jobs are in another partition or queue than requested: a plugin or hook of
the scheduler (job_submit of Slurm, queuejob of PBS) or an operator moved them.

MalleTrain relies on preemption, and the scheduler may not preempt jobs in other partitions. Such
leases therefore leave, and for :data:`MOVED_PAUSE_S` no lease is requested. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scavenger.batch.rules import span

MOVED_PAUSE_S = 600.0
"""Time for which no lease is requested after one was moved, seconds."""


class MovedLeases:
    """Checks in each poll in which partitions or queues the jobs of leases are.

    Args:
        scheduler: name of the scheduler, for messages.
        noun: the scheduler's word, ``"partition"`` or ``"queue"``.
        table: table of the configuration that names the partition or queue of leases.
    """

    def __init__(self, scheduler: str, noun: str, table: str) -> None:
        self._scheduler, self._noun, self._table = scheduler, noun, table
        self._seen_at = float("-inf")
        """Time of the newest poll with a moved lease."""
        self._sentence = ""

    def reasons_to_leave(
        self, partitions: Mapping[str, str], allowed: Collection[str], now: float
    ) -> dict[str, str]:
        """Return lease → why it has to leave, for the moved leases.

        Args:
            partitions: lease → partitions or queue of its job, separated by commas; without leases
                that have ended.
            allowed: partitions or queues in which leases may run; empty: any.
            now: epoch seconds.
        """
        leave = {}
        for lease, names in sorted(partitions.items()):
            others = sorted(set(names.split(",")).difference(allowed, {""}))
            if allowed and others:
                place = f"in {self._noun} {', '.join(others)}"
                leave[lease] = f"its job is {place}, not in {', '.join(sorted(allowed))}"
                self._seen_at = now
                self._sentence = (
                    f"lease {lease} is {place}, not in {', '.join(sorted(allowed))}, and "
                    f"{self._scheduler} may not preempt it there; exempt leases from the plugin or "
                    f"hook that moves them, or set {self._noun} in [{self._table}] to where leases "
                    "may run"
                )
        return leave

    def reason_to_pause(self, now: float) -> str:
        """Return why no lease may be requested now; empty if leases may be requested."""
        remaining_s = self._seen_at + MOVED_PAUSE_S - now
        return f"{self._sentence} (next try in {span(remaining_s)})" if remaining_s > 0 else ""
