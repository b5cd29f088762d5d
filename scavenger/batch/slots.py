"""Slots: which shares of a partly used host are idle, and the facts about each.

A slot is an amount of one host's resources, such as 1 GPU, 8 cores and 60 GB. A site names its
kinds of slots (:class:`SlotKind`). Every host is divided into as many slots of a kind as it could
hold if it were empty: ``c1/gpu.0`` to ``c1/gpu.3``. A slot that no lease has is idle if its amounts
fit into the resources that no job has. The scheduler does not know these names: it chooses the
devices of a lease.

To everything but the scheduler's commands a slot is what a node is at a site without slots: it has
a name, a class (the kind) and a topology group (the host). Pure: asks no scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from scavenger.batch.groups import MAX_LEASES_PER_JOB
from scavenger.batch.rules import NodeFacts
from scavenger.interface import kind_of, slot_name

Amounts = Mapping[str, int]
"""Resource → amount. ``cpus``: logical processors as the scheduler counts them; ``memory_mb``:
MiB; any other name: a generic resource as the scheduler names it, such as ``gpu``, ``gpu:a100`` or
``shard``. A typed resource counts under both names.
"""
CPUS, MEMORY_MB = "cpus", "memory_mb"
NO_PARTS: Mapping[str, Sequence[int]] = MappingProxyType({})
NO_HOSTS: Mapping[str, Mapping[str, DeviceParts]] = MappingProxyType({})
ANY, OWN_USER, NOBODY, PARTITION = "any", "own-user", "nobody", "partition:"
"""Values of :attr:`SlotKind.beside`; the last one is followed by names of partitions or queues,
separated by commas.
"""


@dataclass(frozen=True)
class SlotKind:
    """A kind of slot."""

    name: str
    """Name of the kind, which is the node class of its slots."""
    amounts: Amounts
    """What a slot has; all amounts are positive."""
    beside: str = ANY
    """Whose jobs may run on the same host: ``any``; ``own-user``: jobs of the lease's user;
    ``nobody``: none; ``partition:A,B``: jobs in these partitions or queues.
    """
    nodes: frozenset[str] = frozenset()
    """Hosts that have such slots (expanded; empty: all)."""
    free_memory: float = 0.0
    """Part of the memory of a slot that must be free without the page cache on a host with other
    jobs; 0: not looked at. See :attr:`HostResources.free_memory_mb`.
    """
    whole_host: bool = False
    """Whether one job of the scheduler has the whole host and runs the leases of all its slots of
    this kind, for machines whose jobs have whole nodes.
    """

    @property
    def needs_neighbours(self) -> bool:
        """Whether it matters which other jobs are on the host of such a slot."""
        return self.beside != ANY or self.free_memory > 0

    @property
    def gres_names(self) -> frozenset[str]:
        """Names of the generic resources of a slot."""
        return frozenset(self.amounts.keys() - {CPUS, MEMORY_MB})

    @property
    def devices(self) -> int:
        """Number of GPUs that a slot sees. The parts of one GPU are one."""
        return self.amounts.get("gpu", int(bool({"shard", "mps"} & self.amounts.keys())))

    def covers(self, host: str) -> bool:
        """Return whether this host has such slots."""
        return not self.nodes or host in self.nodes


class Neighbour(NamedTuple):
    """A job of the main scheduler on a host that is not a lease of ours."""

    user: str
    """User of the job."""
    partition: str
    """Partition or queue in which it runs."""


class DeviceParts(NamedTuple):
    """The devices of a host whose parts are a resource, such as the GPUs whose shards are."""

    device: str
    """Name of the resource that such a device is as a whole."""
    total: Sequence[int]
    """Amount that each device has."""
    free: Sequence[int]
    """Amount that is idle on each device that can be divided now. Others are allocated as a
    whole, or it is not known how much of them is.
    """


@dataclass(frozen=True)
class HostResources:
    """The main scheduler's report about the resources of one host."""

    total: Amounts
    """What jobs can use of the host."""
    used: Amounts
    """What jobs use, our leases included."""
    neighbours: tuple[Neighbour, ...] = ()
    """Other jobs on the host. Empty unless a kind needs them
    (:attr:`SlotKind.needs_neighbours`).
    """
    closed: str = ""
    """Why no further job can start on the host, for example because a job has exclusive use of it;
    empty if one can.
    """
    job_memory_mb: int | None = None
    """Maximum memory of one job, MiB; None: that of the host."""
    threads_per_core: int = 1
    """Processors of a core, of which a step has all."""
    parts: Mapping[str, DeviceParts] = field(default_factory=dict)
    """Resource whose amounts are parts of devices, such as ``shard`` → these devices. A slot has
    its amount of one device.
    """
    free_memory_mb: int | None = None
    """Memory of the host that is neither in use nor page cache, MiB; None: not known. Other idle
    memory is page cache, which the kernel gives up, or is used by jobs beyond their requests.
    """


class LeasedSlot(NamedTuple):
    """A slot for which there is a lease."""

    lease: str
    """Id of the lease."""
    runs: bool
    """Whether it runs, so that its amounts are among the used ones; otherwise it waits."""


def capacity(
    total: Amounts, amounts: Amounts, parts: Mapping[str, Sequence[int]] = NO_PARTS
) -> int:
    """Return how many slots of these amounts fit into ``total``.

    Args:
        total: what there is.
        amounts: what a slot has.
        parts: resource whose amounts are parts of devices → amount of each device.
    """
    counts = (
        sum(part // amount for part in parts[name])
        if name in parts
        else total.get(name, 0) // amount
        for name, amount in amounts.items()
    )
    return max(0, min(counts, default=0))


def parts_of_hosts(slots: Iterable[str]) -> dict[str, float]:
    """Return kind → the part of a host that one slot of this kind takes: 1 ÷ the number of such
    slots on the host with the most of them.

    Args:
        slots: names of all slots; names of whole nodes are ignored.
    """
    counts = Counter(name.rpartition(".")[0] for name in slots if kind_of(name))
    most: dict[str, int] = {}
    for place, count in counts.items():
        kind = kind_of(f"{place}.0")
        most[kind] = max(count, most.get(kind, 0))
    return {kind: 1 / count for kind, count in most.items()}


def slot_facts(
    host: NodeFacts,
    use: HostResources,
    kinds: Iterable[SlotKind],
    leased: Mapping[str, LeasedSlot],
    idle_since: Mapping[str, float],
    now: float,
    owner: str = "",
) -> list[NodeFacts]:
    """Return the facts about each slot of a host.

    Slots of several kinds are considered one kind at a time, so the same idle GPU can be part of an
    idle slot of each kind. A request for the second one is refused when the first is leased.

    Args:
        host: facts about the host.
        use: its resources.
        kinds: the site's kinds of slots.
        leased: slot → its lease, for slots of this host.
        idle_since: slot → time since which it is idle, from the previous poll.
        now: epoch seconds.
        owner: the one user who has leases; empty if there are several.
    """
    kinds = [kind for kind in kinds if kind.covers(host.name)]
    free = {name: total - use.used.get(name, 0) for name, total in use.total.items()}
    free_parts = {name: list(parts.free) for name, parts in use.parts.items()}
    for kind in kinds:
        # A waiting lease will soon have its resources.
        waiting = sum(not s.runs for name, s in leased.items() if kind_of(name) == kind.name)
        amounts = _with_untyped(kind.amounts)
        for resource, amount in amounts.items():
            if waiting and resource in free:
                free[resource] -= waiting * amount
        for name, parts in use.parts.items():
            for _ in range(waiting):
                _divide(free, free_parts[name], amounts, name, parts)
    facts = []
    waiting_mb = _reserved_mb(kinds, leased)
    for kind in kinds:
        count = slots_of_host(kind, use)
        if kind.whole_host:
            fitting = count if host.idle and not leased else 0
        else:
            fitting = 0 if use.closed else capacity(free, kind.amounts, free_parts)
        beside = neighbour_reason(kind, use.neighbours, owner)
        names = [slot_name(host.name, kind.name, number) for number in range(count)]
        of_kind = [slot for name, slot in leased.items() if kind_of(name) == kind.name]
        # Without a lease of its own, a slot of a whole host is held by the job of the others.
        holder = of_kind[0] if kind.whole_host and of_kind else None
        idle_count = 0
        # The host may have had more resources when these were leased.
        names += [n for n in leased if kind_of(n) == kind.name and n not in names]
        for name in names:
            lease = leased.get(name, holder)
            idle = lease is None and fitting > 0
            fitting -= idle
            idle_count += idle
            facts.append(
                host._replace(
                    name=name,
                    state=host.state if lease is not None else _state(host, use, free, kind),
                    idle=idle,
                    beside=beside,
                    memory=memory_reason(kind, use, idle_count, waiting_mb) if idle else "",
                    idle_since=idle_since.get(name, now) if idle else None,
                    lease=lease.lease if lease is not None else "",
                    kind=kind.name,
                    unit=host.name if kind.whole_host else "",
                )
            )
    return facts


def slots_of_host(kind: SlotKind, use: HostResources) -> int:
    """Return how many slots of this kind the host has if it is empty. One job runs those of a whole
    host, within its memory, each with whole cores.
    """
    parts = {name: each.total for name, each in use.parts.items()}
    if not kind.whole_host:
        return capacity(use.total, kind.amounts, parts)
    total, cores = dict(use.total), use.threads_per_core
    if use.job_memory_mb is not None:
        total[MEMORY_MB] = min(total[MEMORY_MB], use.job_memory_mb)
    amounts = {**kind.amounts, CPUS: -(-kind.amounts[CPUS] // cores) * cores}
    return min(capacity(total, amounts, parts), MAX_LEASES_PER_JOB)


def _with_untyped(amounts: Amounts) -> Amounts:
    """Return the amounts with those of typed resources counted under the untyped name too."""
    untyped: Counter[str] = Counter()
    for name, amount in amounts.items():
        if ":" in name:
            untyped[name.partition(":")[0]] += amount
    return {**untyped, **amounts}


def _divide(
    free: dict[str, int], on_devices: list[int], amounts: Amounts, name: str, parts: DeviceParts
) -> None:
    """Take what a waiting lease needs from the devices whose parts are ``name``."""
    whole = max(parts.total, default=0)
    for _ in range(amounts.get(parts.device, 0)):  # it takes devices as a whole
        if whole in on_devices:
            on_devices.remove(whole)
    if amount := amounts.get(name, 0):
        fits = [part for part in on_devices if part >= amount]
        if not fits:
            return
        part = min(fits)
        on_devices[on_devices.index(part)] -= amount
        if part == whole:
            for resource in free:
                if resource.partition(":")[0] == parts.device:
                    free[resource] -= 1


def neighbour_reason(kind: SlotKind, neighbours: Iterable[Neighbour], owner: str = "") -> str:
    """Return why a slot of this kind may not be beside these jobs; empty if it may.

    Args:
        kind: the kind.
        neighbours: jobs of the main scheduler on the host.
        owner: the one user who has leases; empty if there are several, so that no job counts as
            one of the lease's user.
    """
    if kind.beside == ANY:
        return ""
    allowed = frozenset(kind.beside.removeprefix(PARTITION).split(","))
    for job in neighbours:
        if kind.beside == OWN_USER and job.user == owner:
            continue
        if kind.beside.startswith(PARTITION) and job.partition in allowed:
            continue
        return (
            f"a job of {job.user} in {job.partition} runs on its host, and slots of kind "
            f"{kind.name} may be beside {_allowed(kind.beside)} only"
        )
    return ""


def memory_reason(kind: SlotKind, use: HostResources, count: int, waiting_mb: float = 0.0) -> str:
    """Return why the memory of a slot does not count as free; empty if it does, or is not known, or
    if no job but our leases is on the host: its memory is page cache then.

    Args:
        kind: the kind.
        use: the host.
        count: number of idle slots of the kind up to this one, for all of which there must be
            memory.
        waiting_mb: free memory that leases which do not run yet need, MiB.
    """
    if not kind.free_memory or use.free_memory_mb is None or not use.neighbours:
        return ""
    needed = count * _needed_mb(kind) + waiting_mb
    if use.free_memory_mb >= needed:
        return ""
    slots = f"{count} idle slots" if count > 1 else "a slot"
    return (
        f"its host has {use.free_memory_mb} MiB of free memory, and {slots} of kind {kind.name} "
        f"need {needed:.0f} MiB free ({kind.free_memory:g} of the memory of a slot): jobs may use "
        "more than they requested, or it is page cache"
    )


def _needed_mb(kind: SlotKind) -> float:
    return kind.free_memory * kind.amounts.get(MEMORY_MB, 0)


def _reserved_mb(kinds: Iterable[SlotKind], leased: Mapping[str, LeasedSlot]) -> float:
    """Return the free memory that leases which do not run yet need, MiB."""
    needed = {kind.name: _needed_mb(kind) for kind in kinds}
    return sum(needed.get(kind_of(name), 0.0) for name, lease in leased.items() if not lease.runs)


def kind_finding(
    kind: SlotKind,
    hosts: Mapping[str, HostResources],
    table: str,
    where: str = "",
) -> tuple[bool, str]:
    """Return (works, sentence) about whether hosts can have such slots, for ``malletrain check``.

    Args:
        kind: the kind.
        hosts: host → its resources, for the hosts on which leases can run.
        table: the scheduler's table of the configuration, such as ``scheduler.slurm``.
        where: where leases run, such as a partition; empty: everywhere.
    """
    usable = {name: use.total for name, use in hosts.items() if kind.covers(name)}
    needs = f"A slot of kind {kind.name} is {described(kind.amounts)}"
    if not usable:
        return False, f"{needs}, but none of its hosts is in {where or 'this machine'}."
    able = [count for name in usable if (count := slots_of_host(kind, hosts[name]))]
    if able:
        return (
            True,
            f"{needs}; {len(able)} of {len(usable)} hosts can have such slots, {sum(able)} in all.",
        )
    most = {
        resource: max(total.get(resource, 0) for total in usable.values())
        for resource in sorted({name for total in usable.values() for name in total})
    }
    short = [name for name, amount in kind.amounts.items() if most.get(name, 0) < amount]
    cause = f"No host has so much {', '.join(short)}" if short else "No host has all of this"
    return (
        False,
        f"{needs}. {cause}: of each resource, hosts have at most {described(most)}. Change this "
        f"kind in [{table}].",
    )


def described(amounts: Amounts) -> str:
    """Return amounts as text: ``1 gpu, 8 cpus, 60 GB``."""
    words = [
        f"{amount} {name}" for name, amount in amounts.items() if name not in (CPUS, MEMORY_MB)
    ]
    if cpus := amounts.get(CPUS):
        words.append(f"{cpus} cpu{'s' * (cpus > 1)}")
    if memory := amounts.get(MEMORY_MB):
        words.append(f"{memory / 1024:.4g} GiB" if memory >= 1024 else f"{memory} MiB")
    return ", ".join(words)


def _state(host: NodeFacts, use: HostResources, free: Amounts, kind: SlotKind) -> str:
    if kind.whole_host:
        return host.state
    if use.closed:
        return f"{host.state}, {use.closed}"
    parts = ", ".join(
        f"{max(0, free.get(name, 0))} of {use.total.get(name, 0)} {_unit(name)}"
        for name in kind.amounts
    )
    return f"{host.state}, with {parts} idle"


def _unit(resource: str) -> str:
    return "MiB" if resource == MEMORY_MB else resource


def _allowed(beside: str) -> str:
    if beside == OWN_USER:
        return "jobs of the lease's own user"
    if beside == NOBODY:
        return "no other job"
    return f"jobs in {beside.removeprefix(PARTITION)}"
