"""Maximum length and memory of a lease job: MaxTime and MaxMemPerNode of its partitions, MaxWall of
its QOS.

Decides which limits apply. A lease that requests more would wait for ever (PartitionTimeLimit,
QOSMaxWallDurationPerJobLimit, MaxMemPerLimit).
"""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.batch.commands import CommandError, Commands
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.parse import read_duration
from scavenger.slurm.site import SlurmSite


def longest_lease(site: SlurmSite, lease: SlurmLeaseOptions) -> tuple[float | None, str]:
    """Return (seconds, the setting that limits them), the smallest of all limits; (None, empty) if
    there is no limit.
    """
    limits: list[tuple[float, str]] = []
    for name in lease.partitions:
        partition = site.partitions.get(name)
        if partition is None:
            continue
        if partition.max_time_s is not None:
            limits.append((partition.max_time_s, f"MaxTime of partition {name}"))
        if (most := site.max_wall.get(partition.qos)) is not None:
            limits.append((most, f"MaxWall of QOS {partition.qos} of partition {name}"))
    if (most := site.max_wall.get(lease.qos)) is not None:
        limits.append((most, f"MaxWall of QOS {lease.qos}"))
    return min(limits, default=(None, ""))


def most_memory_mb(site: SlurmSite, lease: SlurmLeaseOptions) -> int:
    """Return the memory that a lease can request on a node, MB; 0: all of its memory."""
    limits = (site.partitions[p].max_memory_mb for p in lease.partitions if p in site.partitions)
    return min((most for most in limits if most is not None), default=0)


def max_walls(commands: Commands, site: SlurmSite) -> Mapping[str, float]:
    """Return QOS → its MaxWall, seconds, if it has one. Empty if limits are not enforced or Slurm
    does not report them.
    """
    if "limits" not in site.settings.get("AccountingStorageEnforce", "").lower():
        return {}
    try:
        printed = commands.ask(["sacctmgr", "-nP", "show", "qos", "format=name,maxwall"])
    except CommandError:
        return {}
    rows = (line.split("|") for line in printed.splitlines() if "|" in line)
    return {row[0]: s for row in rows if (s := read_duration(row[1])) is not None}
