"""How long a job of the main scheduler may wait because a lease has its nodes: for ``malletrain
check``.

Decides what adds up. From preempt_select_promiscuous of Slurm: a lease that has run for less than
its exempt time is no candidate; once chosen it has GraceTime, then SIGTERM, and SIGKILL after
KillWait; who waits is looked at again once a backfill cycle at the latest. See slurm.conf(5),
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
    """The parts of it, seconds."""

    exempt_s: float
    """In which a lease that has begun cannot be preempted."""
    exempt_by: str
    """Where that is said."""
    grace_s: float
    """From the notice of a preemption to its end."""
    kill_wait_s: float
    """Which Slurm then gives to a lease that has not ended by itself."""
    cycle_s: float
    """Until Slurm looks at the job again."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.exempt_s + self.grace_s + self.kill_wait_s + self.cycle_s


def longest_wait(
    site: SlurmSite, partition: str, qos: str, exempt_of: Mapping[str, float | None]
) -> LongestWait:
    """The longest wait for a lease.

    Args:
        site: the Slurm.
        partition: of the leases; empty: it is not named.
        qos: of the leases; empty: it is not named.
        exempt_of: QOS → its PreemptExemptTime, seconds; None: not set there. One that is set counts
            more than that of the cluster.
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
        # A time of -1 (UNLIMITED, INFINITE) is the same as 0.
        exempt_s, exempt_by = read_duration(site.settings.get(CLUSTER, "")) or 0.0, CLUSTER
    grace_s = configured.grace_s if configured is not None else 0.0
    return LongestWait(exempt_s, exempt_by, grace_s, site.kill_wait_s, site.backfill_cycle_s or 0.0)


def exempt_times(commands: Commands, site: SlurmSite) -> dict[str, float | None]:
    """QOS → its PreemptExemptTime, seconds; None: not set there. Empty where Slurm has no
    accounting, or does not say.
    """
    if "slurmdbd" not in site.settings.get("AccountingStorageType", ""):
        return {}
    try:
        printed = commands.ask(["sacctmgr", "-nP", "show", "qos", "format=name,preemptexempttime"])
    except CommandError:
        return {}
    rows = [line.split("|") for line in printed.splitlines() if "|" in line]
    return {row[0]: read_duration(row[1]) if row[1] else None for row in rows}
