"""Idle GPUs of a machine whose hosts several jobs share, from a log that says what jobs hold.

Computes how many GPUs are idle on hosts without a job and on hosts that jobs use in part, in which
fragments, and how much of that leases of slots and of whole nodes could harvest.
:mod:`malletrain.assess.hosts` says what jobs hold on each host.

A slot exists on a host while its GPUs, CPUs and memory are free there. Of several slots that fit
beside each other, the last ends first when a job takes resources. An interval counts as a whole:
what a start in it costs is not subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from malletrain.assess.gaps import LENGTH_EDGES_S
from malletrain.assess.hosts import (
    Booleans,
    Floats,
    Hosts,
    HostSize,
    HostUse,
    Integers,
    MachineUse,
    states,
)
from malletrain.config.units import UnitError, format_size, parse_size
from malletrain.protocol.counting import counted
from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.workloads import WorkloadError
from scavenger.hostlist import named

MIN_GAP_S = 60.0
"""Intervals that are not longer than this do not count as harvested, seconds."""


@dataclass(frozen=True)
class SlotSize:
    """A share of one host that is leased as a unit."""

    gpus: int = 1
    cpus: int = 0
    memory: int = 0
    """Bytes."""

    def __str__(self) -> str:
        cpus = f",cpus={self.cpus}" if self.cpus else ""
        memory = f",memory={format_size(self.memory)}" if self.memory else ""
        return f"gpus={self.gpus}{cpus}{memory}"

    @classmethod
    def parse(cls, text: str) -> SlotSize:
        """Return the slot in a text such as ``gpus=1,cpus=8,memory=60GB``.

        Raises:
            WorkloadError: it is no such text, or has no GPU.
        """
        amounts = {}
        for word in text.split(","):
            name, _, amount = (part.strip() for part in word.partition("="))
            try:
                if name not in ("gpus", "cpus", "memory") or name in amounts:
                    raise UnitError("")
                amounts[name] = parse_size(amount) if name == "memory" else int(amount)
                if amounts[name] < 1:
                    raise UnitError("")
            except ValueError as error:
                raise WorkloadError(
                    f"--slot {text}: '{word.strip()}' is no part of a slot such as "
                    f"gpus=1,cpus=8,memory=60GB. {error}".strip()
                ) from None
        if "gpus" not in amounts:
            raise WorkloadError(f"--slot {text}: The slot has no GPU; give gpus=1 or more.")
        return cls(**amounts)


@dataclass(frozen=True)
class Harvest:
    """What leases of one kind could harvest, if there were no others."""

    gpu_hours: float
    """GPU-hours in intervals longer than :data:`MIN_GAP_S`."""
    gaps: int
    """Number of these intervals."""
    median_s: float | None
    """Their median length, seconds; None if there is none."""

    def to_dict(self, idle_gpu_hours: float) -> dict[str, Any]:
        """Return plain values for JSON, with the fraction of the idle GPU-hours."""
        return {
            "gpu_hours": self.gpu_hours,
            "fraction_of_idle": self.gpu_hours / idle_gpu_hours if idle_gpu_hours else 0.0,
            "gaps": self.gaps,
            "gap_median_s": self.median_s,
        }


@dataclass(frozen=True)
class FragmentBin:
    """Fragments: intervals in which one host has the same number of idle GPUs."""

    idle_gpus: int
    host_idle: bool
    """Whether the host has no job at all."""
    from_s: float
    """Minimum length, seconds."""
    to_s: float
    """Length that is not reached, seconds."""
    fragments: int
    gpu_hours: float


@dataclass(frozen=True)
class GpuReport:
    """The idle GPUs of a machine."""

    hosts: int
    """Number of hosts with GPUs."""
    gpus: int
    hours: float
    """Length of the observation."""
    idle_gpu_hours_partly_used_hosts: float
    idle_gpu_hours_idle_hosts: float
    fragments: tuple[FragmentBin, ...]
    """In order of idle GPUs, those of idle hosts last; without empty bins."""
    slots: tuple[tuple[SlotSize, Harvest], ...]
    whole_nodes: Harvest
    evenly_spread_node_s: float
    """Node-seconds of jobs on several nodes whose GPUs were divided evenly by assumption."""
    assumptions: tuple[str, ...] = field(default=())
    """Sentences for the reader of a report."""

    @property
    def idle_gpu_hours(self) -> float:
        """All idle GPU-hours."""
        return self.idle_gpu_hours_partly_used_hosts + self.idle_gpu_hours_idle_hosts

    @property
    def idle_gpu_fraction(self) -> float:
        """Idle GPU-seconds by all GPU-seconds of the machine."""
        return self.idle_gpu_hours / (self.gpus * self.hours)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the open edge of the last bins is None."""
        idle = self.idle_gpu_hours
        return {
            "gpu_hosts": self.hosts,
            "gpus": self.gpus,
            "idle_gpu_fraction": self.idle_gpu_fraction,
            "idle_gpu_hours_partly_used_hosts": self.idle_gpu_hours_partly_used_hosts,
            "idle_gpu_hours_idle_hosts": self.idle_gpu_hours_idle_hosts,
            "evenly_spread_node_seconds": self.evenly_spread_node_s,
            "fragments": [
                {
                    "idle_gpus": b.idle_gpus,
                    "host_idle": b.host_idle,
                    "from_s": b.from_s,
                    "to_s": b.to_s if math.isfinite(b.to_s) else None,
                    "fragments": b.fragments,
                    "gpu_hours": b.gpu_hours,
                }
                for b in self.fragments
            ],
            "slots": [
                {
                    "slot": str(slot),
                    "gpus": slot.gpus,
                    "cpus": slot.cpus,
                    "memory_bytes": slot.memory,
                    **harvest.to_dict(idle),
                }
                for slot, harvest in self.slots
            ],
            "whole_nodes": self.whole_nodes.to_dict(idle),
        }


def has_gpus(log: JobLog) -> bool:
    """Return whether the log lists a GPU of a job whose nodes it names."""
    return any(_gpus(job) and job.names for job in log.jobs)


def _gpus(job: LogJob) -> int:
    total = sum(part.gpus for part in job.per_node)
    return total + (job.allocated.gpus if job.allocated is not None else 0)


def gpu_report(
    log: JobLog,
    use: MachineUse,
    hosts: Hosts,
    slots: Sequence[SlotSize] = (SlotSize(),),
    nodes: int | None = None,
) -> GpuReport:
    """Return the idle GPUs of the machine of ``log``.

    Args:
        log: jobs with the names of their nodes and what they hold there. A job of which the log
            does not say that holds its nodes as a whole.
        use: what these jobs hold on each host, with memory if a slot asks for some.
        hosts: what is stated about the hosts. What is not stated is taken to be the most that jobs
            hold at once.
        slots: each is assessed as if there were no others.
        nodes: number of nodes of the machine. Those that neither the log nor ``hosts`` names count
            as idle, if the GPUs of every host are stated. Default: as named.

    Raises:
        WorkloadError: the log has no names of nodes or does not list what jobs hold, or no host
            has a GPU.
    """
    _require(log)
    names = [*use.hosts, *(name for name in hosts.names if name not in use.hosts)]
    unseen = [f"unseen-{k + 1}" for k in range((nodes or 0) - len(names))]
    if hosts.gpus.default is not None:
        names += unseen
        unseen = []
    totals = _Totals(slots)
    for name in names:
        totals.add(use.of(name), hosts.of(name), use.duration_s, name)
    if not totals.gpus:
        raise WorkloadError(
            "No host has a GPU: neither does a job of the log hold one, nor is one stated "
            "(--gpus-per-node, --nodes-file)."
        )
    return GpuReport(
        hosts=totals.hosts,
        gpus=totals.gpus,
        hours=use.duration_s / 3600.0,
        idle_gpu_hours_partly_used_hosts=totals.partly_gpu_s / 3600.0,
        idle_gpu_hours_idle_hosts=totals.idle_gpu_s / 3600.0,
        fragments=totals.fragment_bins(),
        slots=tuple(
            (slot, _harvest(lengths, slot.gpus))
            for slot, lengths in zip(slots, totals.slot_gaps, strict=True)
        ),
        whole_nodes=totals.whole_nodes(),
        evenly_spread_node_s=use.evenly_spread_node_s,
        assumptions=tuple(_assumptions(log, use, hosts, totals, unseen)),
    )


def _require(log: JobLog) -> None:
    if not log.lists_resources:
        raise WorkloadError(
            f"The log ({log.source}) does not say what jobs hold on their nodes. With sacct, add "
            "the column AllocTRES (--format=…,NodeList,AllocTRES)."
        )
    if not any(job.names for job in log.jobs):
        raise WorkloadError(
            f"The log ({log.source}) does not say which nodes jobs had, so that nothing is known "
            "of the GPUs beside them. With sacct, add the column NodeList."
        )


class _Totals:
    """Sums over hosts."""

    def __init__(self, slots: Sequence[SlotSize]) -> None:
        self.slots = slots
        self.hosts = 0
        """Number of hosts with GPUs."""
        self.gpus = 0
        self.largest = 0
        """Largest number of GPUs of a host."""
        self.partly_gpu_s = 0.0
        """Idle GPU-seconds of hosts with a job."""
        self.idle_gpu_s = 0.0
        """Idle GPU-seconds of hosts without a job."""
        self.excess_gpu_s = 0.0
        """GPU-seconds of jobs beyond the GPUs of their host."""
        self.excess_hosts: list[str] = []
        self.unused_hosts: list[str] = []
        """Hosts with GPUs on which jobs ran and none held a GPU."""
        self.inferred: dict[str, list[str]] = {"GPUs": [], "CPUs": [], "memory": []}
        """Hosts with GPUs of which nobody states the resource."""
        self.uses: dict[str, bool] = {"CPUs": False, "memory": False}
        """Whether the log lists the resource of a job on a host with GPUs."""
        self.slot_gaps: list[list[Floats]] = [[] for _ in slots]
        self._node_gaps: list[tuple[Floats, int]] = []
        self._fragments: dict[tuple[bool, int], tuple[Integers, Floats]] = {}

    def add(self, use: HostUse, size: HostSize, duration: float, name: str) -> None:
        """Add one host.

        Args:
            use: its jobs.
            size: what is stated about it.
            duration: length of the observation, seconds.
            name: its name, for sentences.
        """
        edges, (jobs, whole, gpus, cpus, memory) = states(use, duration)
        gpu_count = int(gpus.max()) if size.gpus is None else size.gpus
        if not gpu_count:
            return
        self.hosts += 1
        self.gpus += gpu_count
        self.largest = max(self.largest, gpu_count)
        lengths = np.diff(edges)
        excess = np.where(whole > 0, 0, np.maximum(gpus - gpu_count, 0))
        if excess.any():
            self.excess_gpu_s += float((excess * lengths).sum())
            self.excess_hosts.append(name)
        if jobs.any() and not gpus.any() and not whole.any():
            self.unused_hosts.append(name)
        for kind, stated in (("GPUs", size.gpus), ("CPUs", size.cpus), ("memory", size.memory)):
            if stated is None:
                self.inferred[kind].append(name)
        self.uses["CPUs"] |= bool(cpus.any())
        self.uses["memory"] |= bool(memory.any())
        host_idle = jobs == 0
        idle = np.where(whole > 0, 0, np.maximum(gpu_count - gpus, 0))
        idle_s = idle * lengths
        self.idle_gpu_s += float(idle_s[host_idle].sum())
        self.partly_gpu_s += float(idle_s[~host_idle].sum())
        self._node_gaps.append((_runs(host_idle, edges), gpu_count))
        self._add_fragments(idle, host_idle, edges)
        free_cpus = (int(cpus.max()) if size.cpus is None else size.cpus) - cpus
        free_memory = (int(memory.max()) if size.memory is None else size.memory) - memory
        for slot, gaps in zip(self.slots, self.slot_gaps, strict=True):
            fits = idle // slot.gpus
            if slot.cpus:
                fits = np.minimum(fits, np.maximum(free_cpus, 0) // slot.cpus)
            if slot.memory:
                fits = np.minimum(fits, np.maximum(free_memory, 0) // slot.memory)
            gaps += [_runs(fits >= level, edges) for level in range(1, int(fits.max()) + 1)]

    def _add_fragments(self, idle: Integers, host_idle: Booleans, edges: Floats) -> None:
        changes = np.flatnonzero((np.diff(idle) != 0) | (np.diff(host_idle) != 0)) + 1
        first = np.concatenate([[0], changes])
        lengths = np.diff(np.append(edges[first], edges[-1]))
        bins = np.searchsorted(LENGTH_EDGES_S, lengths, side="right") - 1
        for key in set(zip(host_idle[first].tolist(), idle[first].tolist(), strict=True)):
            if not key[1]:
                continue
            of_key = (host_idle[first] == key[0]) & (idle[first] == key[1])
            number, seconds = self._fragments.setdefault(
                key,
                (np.zeros(len(LENGTH_EDGES_S) - 1, np.int64), np.zeros(len(LENGTH_EDGES_S) - 1)),
            )
            np.add.at(number, bins[of_key], 1)
            np.add.at(seconds, bins[of_key], lengths[of_key])

    def fragment_bins(self) -> tuple[FragmentBin, ...]:
        """Return the histogram."""
        return tuple(
            FragmentBin(
                idle_gpus,
                host_idle,
                LENGTH_EDGES_S[k],
                LENGTH_EDGES_S[k + 1],
                int(number[k]),
                idle_gpus * float(seconds[k]) / 3600.0,
            )
            for (host_idle, idle_gpus), (number, seconds) in sorted(self._fragments.items())
            for k in np.flatnonzero(number)
        )

    def whole_nodes(self) -> Harvest:
        """Return what leases of whole nodes harvest."""
        gaps = [(_long(lengths), gpus) for lengths, gpus in self._node_gaps]
        every = np.concatenate([lengths for lengths, _ in gaps])
        return Harvest(
            sum(float(lengths.sum()) * gpus for lengths, gpus in gaps) / 3600.0,
            len(every),
            float(np.median(every)) if len(every) else None,
        )


def _long(lengths: Floats) -> Floats:
    return lengths[lengths > MIN_GAP_S]


def _harvest(gaps: Sequence[Floats], gpus: int) -> Harvest:
    lengths = _long(np.concatenate([np.zeros(0), *gaps]))
    return Harvest(
        gpus * float(lengths.sum()) / 3600.0,
        len(lengths),
        float(np.median(lengths)) if len(lengths) else None,
    )


def _runs(mask: Booleans, edges: Floats) -> Floats:
    """Return the lengths of the longest intervals in which ``mask`` holds."""
    changes = np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))
    return edges[np.flatnonzero(changes < 0)] - edges[np.flatnonzero(changes > 0)]


def _assumptions(
    log: JobLog, use: MachineUse, hosts: Hosts, totals: _Totals, unseen: Sequence[str]
) -> Iterable[str]:
    """Yield what the report assumes, as sentences."""
    spread = use.evenly_spread_node_s
    if spread:
        uneven = (
            f" Of these, {use.uneven_node_s:,.0f} node-seconds have a number of GPUs that is no "
            "multiple of the nodes: the first nodes have one more."
            if use.uneven_node_s
            else ""
        )
        yield (
            f"{spread:,.0f} node-seconds of jobs on several nodes are spread evenly: the log has "
            f"only the sum of their GPUs.{uneven}"
        )
    if use.whole_jobs:
        yield (
            f"{counted(use.whole_jobs, 'job')} {'counts' if use.whole_jobs == 1 else 'count'} as "
            "holding all GPUs of the hosts used: the log says so, or does not say what is held."
        )
    if use.unnamed_jobs:
        yield (
            f"{counted(use.unnamed_jobs, 'job')} {'holds' if use.unnamed_jobs == 1 else 'hold'} no "
            "GPU here: the log does not say on which nodes."
        )
    if not has_gpus(log):
        yield (
            "No job of the log holds a GPU. If jobs of this machine do, the scheduler does not "
            "record them: with Slurm, set AccountingStorageTRES=gres/gpu; what the log misses "
            "looks idle."
        )
    yield from _stated_hosts(log, use, hosts, totals)
    if unseen:
        have = "has" if len(unseen) == 1 else "have"
        yield (
            f"{counted(len(unseen), 'node')} that neither the log nor an option names {have} no "
            "GPU here."
        )
    yield from _unstated_sizes(totals)
    for slot in totals.slots:
        if slot.gpus > totals.largest:
            yield f"No host has {slot.gpus} GPUs: a slot of gpus={slot.gpus} fits nowhere."


def _unstated_sizes(totals: _Totals) -> Iterable[str]:
    """Yield which sizes of hosts are inferred, and which use is not listed."""
    in_slots = {
        "GPUs": True,
        "CPUs": any(slot.cpus for slot in totals.slots),
        "memory": any(slot.memory for slot in totals.slots),
    }
    for kind, names in totals.inferred.items():
        if names and in_slots[kind]:
            yield (
                f"{counted(len(names), 'host')} ({named(names)}) "
                f"{'counts' if len(names) == 1 else 'count'} as having no more {kind} than "
                f"jobs held at once at most (else: --{kind.lower()}-per-node, --nodes-file)."
            )
    for kind, listed in totals.uses.items():
        if in_slots[kind] and not listed:
            yield f"The log lists no {kind} of jobs on hosts with GPUs: all of it looks free."


def _stated_hosts(log: JobLog, use: MachineUse, hosts: Hosts, totals: _Totals) -> Iterable[str]:
    """Yield where the log and what is stated about hosts do not agree."""
    stated = dict.fromkeys(hosts.names)
    never = [name for name in stated if name not in use.hosts]
    if never:
        where = f" ({hosts.place(never[0])})" if never[0] in hosts.listed else ""
        yield (
            f"No job of the log ran on {len(never)} of the stated hosts, {named(never)}{where}: "
            "they count as idle throughout."
        )
    names = [*use.hosts, *stated]
    if patterns := hosts.idle_patterns(names):
        yield f"No host matches {', '.join(patterns)} of the options."
    if hosts.file:
        foreign = [name for name in use.hosts if name not in stated]
        if foreign:
            place = log.place(use.first_jobs[foreign[0]])
            yield (
                f"{hosts.file} does not have {counted(len(foreign), 'host')} of the log, "
                f"{named(foreign)} (first: {foreign[0]} at {place})."
            )
    if totals.unused_hosts:
        yield (
            f"No job held a GPU on {counted(len(totals.unused_hosts), 'host')}, "
            f"{named(totals.unused_hosts)}: the GPUs there count as idle. If there are none, "
            "say so (--gpus-per-node HOSTS=0)."
        )
    if totals.excess_hosts:
        first = totals.excess_hosts[0]
        yield (
            f"Jobs hold more GPUs than their host has for {totals.excess_gpu_s / 3600:,.1f} "
            f"GPU-hours on {named(totals.excess_hosts)} (first job on {first}: "
            f"{log.place(use.first_jobs[first])}); these count as the GPUs of the host."
        )
