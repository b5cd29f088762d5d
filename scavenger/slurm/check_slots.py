"""Tests the site's kinds of slots against a live Slurm, for ``malletrain check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scavenger.batch.commands import Commands
from scavenger.batch.look import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import HostResources, SlotKind, capacity, described
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
    usable = {
        name: use
        for name, use in hosts.items()
        if kind.covers(name) and (not partitions or name in there)
    }
    needs = f"A slot of kind {kind.name} is {described(kind.amounts)}"
    if not usable:
        return False, f"{needs}, but none of its hosts is in {lease.partition or 'any partition'}."
    counts = {name: capacity(use.total, kind.amounts) for name, use in usable.items()}
    able = [count for count in counts.values() if count]
    if able:
        return (
            True,
            f"{needs}; {len(able)} of {len(usable)} hosts can have such slots, {sum(able)} in all.",
        )
    most = {
        resource: max(use.total.get(resource, 0) for use in usable.values())
        for resource in sorted({name for use in usable.values() for name in use.total})
    }
    short = [name for name, amount in kind.amounts.items() if most.get(name, 0) < amount]
    what = f"No host has so much {', '.join(short)}" if short else "No host has all of it"
    return (
        False,
        f"{needs}. {what}: of each resource, hosts have at most {described(most)}. Change this "
        "kind in [scheduler.slurm].",
    )
