"""The longest time that a job of the main scheduler waits because a lease has its nodes, for
``malletrain check``.

Decides which times add up. By Slurm's preempt_select_promiscuous, a lease cannot be preempted
during its exempt time. A preempted lease then has GraceTime, SIGTERM, and SIGKILL after KillWait.
The waiting job is reconsidered at least once per backfill cycle. See slurm.conf(5),
PreemptExemptTime, GraceTime, KillWait, bf_interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scavenger.batch.commands import CommandError, Commands
from scavenger.slurm.parse import read_duration
from scavenger.slurm.site import SlurmSite

CLUSTER = "PreemptExemptTime"
DEFAULT_QOS = "normal"


@dataclass(frozen=True)
class LongestWait:
    """The parts of the longest wait, seconds."""

    exempt_s: float
    """Time after its start in which a lease cannot be preempted."""
    exempt_by: str
    """The setting from which ``exempt_s`` comes."""
    grace_s: float
    """Time from the notice of a preemption to SIGTERM."""
    kill_wait_s: float
    """Time from SIGTERM to SIGKILL, if the lease has not ended by itself."""
    cycle_s: float
    """Maximum time until Slurm considers the job again."""

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return self.exempt_s + self.grace_s + self.kill_wait_s + self.cycle_s


def longest_wait(
    site: SlurmSite, partition: str, qos: str, exempt_of: Mapping[str, float | None]
) -> LongestWait:
    """Return the longest wait for a lease.

    Args:
        site: the Slurm site.
        partition: partition of the leases; empty if it is not set.
        qos: QOS of the leases; empty if it is not set.
        exempt_of: QOS → its PreemptExemptTime, seconds; None if it is not set. A set value takes
            precedence over that of the cluster.
    """
    configured = site.partitions.get(partition)
    named = [
        name
        for name in (configured.qos if configured is not None else "", qos or DEFAULT_QOS)
        if name
    ]
    by_qos = {n: s for n in named if (s := exempt_of.get(n)) is not None}
    if by_qos:
        name = max(by_qos, key=lambda n: by_qos[n])
        exempt_s, exempt_by = by_qos[name], f"{CLUSTER} of QOS {name}"
    else:
        # A time of -1 (UNLIMITED, INFINITE) means 0.
        exempt_s, exempt_by = read_duration(site.settings.get(CLUSTER, "")) or 0.0, CLUSTER
    grace_s = configured.grace_s if configured is not None else 0.0
    return LongestWait(exempt_s, exempt_by, grace_s, site.kill_wait_s, site.backfill_cycle_s or 0.0)


def exempt_times(commands: Commands, site: SlurmSite) -> dict[str, float | None]:
    """Return QOS → its PreemptExemptTime, seconds; None if it is not set. Empty if Slurm has no
    accounting or does not report it.
    """
    if "slurmdbd" not in site.settings.get("AccountingStorageType", ""):
        return {}
    try:
        printed = commands.ask(["sacctmgr", "-nP", "show", "qos", "format=name,preemptexempttime"])
    except CommandError:
        return {}
    rows = [line.split("|") for line in printed.splitlines() if "|" in line]
    return {row[0]: read_duration(row[1]) if row[1] else None for row in rows}
