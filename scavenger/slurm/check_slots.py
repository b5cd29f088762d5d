"""Tests the site's kinds of slots against a live Slurm, for ``malletrain check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scavenger.batch.commands import Commands
from scavenger.batch.look import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import HostResources, SlotKind, kind_finding
from scavenger.interface import SchedulerError
from scavenger.slurm.hosts import HOSTS, read_hosts
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.site import SlurmSite


def slot_findings(
    site: SlurmSite, settings: BatchSettings[SlurmLeaseOptions], commands: Commands
) -> Iterator[Finding]:
    """Yield (works, sentence) for each kind of slots, and for what keeps slots from working at all.

    Args:
        site: configuration of Slurm.
        settings: settings of the site.
        commands: runs commands.
    """
    if not settings.slots:
        return
    select = site.settings.get("SelectType", "")
    if select and not select.endswith(("cons_tres", "cons_res")):
        yield (
            False,
            f"Slurm allocates whole nodes (SelectType={select}), so that nothing is idle on a used "
            "one; remove slots from [scheduler.slurm], or have Slurm use select/cons_tres.",
        )
        return
    try:
        hosts = read_hosts(commands.ask([*HOSTS]))
    except SchedulerError as error:
        yield False, f"What the hosts have cannot be read: {error}"
        return
    for kind in settings.slots:
        yield _kind_finding(kind, hosts, site, settings.lease)
    if "MEMORY" not in site.settings.get("SelectTypeParameters", "").upper():
        yield (
            True,
            "Slurm does not allocate memory (SelectTypeParameters has no CR_…_Memory), so the "
            "memory of slots is neither reserved nor bounded.",
        )


def _kind_finding(
    kind: SlotKind, hosts: Mapping[str, HostResources], site: SlurmSite, lease: SlurmLeaseOptions
) -> Finding:
    partitions = [site.partitions[name] for name in lease.partitions if name in site.partitions]
    there = frozenset[str]().union(*(partition.nodes for partition in partitions))
    usable = {name: use.total for name, use in hosts.items() if not partitions or name in there}
    return kind_finding(kind, usable, "scheduler.slurm", lease.partition or "any partition")
