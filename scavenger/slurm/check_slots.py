"""Tests the site's kinds of slots against a live Slurm, for ``malletrain check``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from scavenger.batch.commands import Commands
from scavenger.batch.poll_result import Finding
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import HostResources, SlotKind, kind_finding, slots_of_host
from scavenger.interface import SchedulerError
from scavenger.slurm.hosts import HOSTS, read_hosts
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.limits import most_memory_mb
from scavenger.slurm.site import SlurmSite

_MIG = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)
"""Part of the type of a GPU that is a slice of one, such as a100_3g.39gb."""


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
    shared = [kind for kind in settings.slots if not kind.whole_host]
    why = site.why_all_nodes_are_whole
    if why and (
        kinds := [kind.name for kind in settings.slots if kind.whole_host and kind.gres_names]
    ):
        yield (
            False,
            f"Slots of kind {', '.join(kinds)} have generic resources and whole hosts, but {why}, "
            "and steps have no generic resources of their own there. Have Slurm use "
            "select/cons_tres, or remove gpus and gres from these kinds.",
        )
        return
    if shared and why:
        yield (
            False,
            f"{why}, so that nothing is idle on a used one; set whole_host = true for each kind in "
            "[[scheduler.slurm.slots]], remove slots from [scheduler.slurm], or have Slurm use "
            "select/cons_tres.",
        )
        return
    try:
        hosts = read_hosts(commands.ask([*HOSTS]))
    except SchedulerError as error:
        yield False, f"What the hosts have cannot be read: {error}"
        return
    lease = settings.lease
    memory_mb = most_memory_mb(site, lease) or None
    hosts = {name: replace(use, job_memory_mb=memory_mb) for name, use in hosts.items()}
    partitions = site.partitions_of_leases(lease.partitions)
    in_partition = frozenset[str]().union(*(partition.nodes for partition in partitions))
    if partitions:
        hosts = {name: use for name, use in hosts.items() if name in in_partition}
    closed = {
        name: why
        for name in hosts
        if (why := site.why_whole_nodes(lease.partitions, name))
        and any(kind.covers(name) for kind in shared)
    }
    able = {
        kind.name: {name for name, use in hosts.items() if _fits(kind, name, use)}
        for kind in shared
    }
    without = {name for name, fitting in able.items() if fitting and fitting <= closed.keys()}
    yield from _whole_nodes(closed, hosts, without)
    usable = {name: use for name, use in hosts.items() if name not in closed}
    for kind in settings.slots:
        if kind.name not in without:
            is_usable = not kind.whole_host and able[kind.name]
            yield _kind_finding(kind, usable if is_usable else hosts, lease)
    for sentence in unconfined(site.settings, shared) if shared else ():
        yield True, sentence


def unconfined(settings: Mapping[str, str], kinds: Sequence[SlotKind]) -> Iterator[str]:
    """Yield a sentence for each resource to which this Slurm does not confine jobs, so that leases
    and the jobs beside them depend on each other's good behaviour.

    Args:
        settings: the settings of ``scontrol show config``, with those of cgroup.conf.
        kinds: the site's kinds of slots.
    """
    plugins = settings.get("TaskPlugin", "").replace("(null)", "none")  # "(null)" since 24.11
    constrains = {
        resource: "cgroup" in plugins and settings.get(f"Constrain{resource}", "").lower() == "yes"
        for resource in ("Cores", "RAMSpace", "Devices")
    }
    if "MEMORY" not in settings.get("SelectTypeParameters", "").upper():
        yield (
            "Slurm does not allocate memory (SelectTypeParameters has no CR_…_Memory), so the "
            "memory of slots is not reserved: all jobs of a host share it."
        )
    if not constrains["Cores"] and "affinity" not in plugins:
        yield (
            f"Slurm does not confine jobs to their processors (TaskPlugin={plugins or 'none'}). A "
            "lease restricts itself to as many as its slot has, unless [nodes] bound_cpus is "
            "false. Other jobs can still use those of the lease. To confine all: "
            "TaskPlugin=task/cgroup,task/affinity, and ConstrainCores=yes in cgroup.conf."
        )
    if not constrains["RAMSpace"]:
        yield (
            "Slurm does not limit the memory of jobs (ConstrainRAMSpace in cgroup.conf). "
            "MalleTrain measures that of its leases and ends a job that uses more than its slot "
            "has, unless [nodes] bound_memory is false. Between two measurements it is not "
            "bounded. Other jobs may use more than they requested; free_memory of a kind keeps its "
            "slots off hosts with other jobs whose memory is not free."
        )
    if not constrains["Devices"] and any("gpu" in kind.amounts for kind in kinds):
        yield (
            "Slurm does not hide the GPUs of other jobs (ConstrainDevices in cgroup.conf). "
            "Programs that ignore CUDA_VISIBLE_DEVICES can use them."
        )
    yield (
        "Nothing bounds what a lease uses of memory bandwidth, network and PCIe beside other jobs. "
        'If that is not acceptable on a host, set beside = "nobody" for its kinds of slots.'
    )


def _fits(kind: SlotKind, name: str, use: HostResources) -> bool:
    """Return whether the host could have a slot of the kind if it were empty."""
    return kind.covers(name) and slots_of_host(kind, use) > 0


def _whole_nodes(
    closed: Mapping[str, str], hosts: Collection[str], without: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding for each reason why the lease of a slot would hold its whole host.

    Args:
        closed: host → the reason.
        hosts: all hosts.
        without: kinds of slots that fit on such hosts only.
    """
    lost = f" There is no other host for slots of kind {', '.join(sorted(without))}."
    for why in sorted(set(closed.values())):
        count = sum(reason == why for reason in closed.values())
        yield (
            False if without else None,
            f"Leases are of slots, but {why}, so that the lease of one slot would hold its whole "
            f"host; MalleTrain leases no slot there ({count} of {len(hosts)} hosts)."
            f"{lost if without else ''} Set OverSubscribe=NO and ExclusiveUser=NO (Exclusive=NO "
            "since Slurm 26.05) for the partition, have leases run in another one (partition in "
            "[scheduler.slurm]), set whole_host = true for the kinds, so that one job runs the "
            "leases of all slots of a host, or "
            "remove slots from [scheduler.slurm] to lease whole nodes.",
        )


def _kind_finding(
    kind: SlotKind, hosts: Mapping[str, HostResources], lease: SlurmLeaseOptions
) -> Finding:
    where = lease.partition or "any partition"
    works, sentence = kind_finding(kind, hosts, "scheduler.slurm", where)
    types = {
        resource.removeprefix("gpu:")
        for name, use in hosts.items()
        if kind.covers(name)
        for resource in use.total
        if resource.startswith("gpu:")
    }
    untyped = "gpu" in kind.amounts and not any(r.startswith("gpu:") for r in kind.amounts)
    if works and untyped and len(types) > 1:
        slices = any(_MIG.search(name) for name in types)
        return (
            False if slices else None,
            f"{sentence} A slot of kind {kind.name} can be a GPU of any type that its hosts have: "
            f"{', '.join(sorted(types))}."
            + (" Some are slices of a GPU (MIG)." if slices else "")
            + " MalleTrain takes all slots of a kind for equally fast; set gpu_type of the kind, "
            "and add a kind for each other type, or set nodes.",
        )
    return works, sentence
