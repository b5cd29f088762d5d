"""Keeps a lease that is a slot within its part of a host on which other jobs run.

Where the main scheduler confines jobs (cgroups), it bounds processors and memory. Elsewhere the
lease bounds itself: :func:`restrict` limits it to as many processors as its slot has and lowers its
priorities, and :class:`MemoryWatch` finds out when it uses more memory than its slot has. Memory
bandwidth, network, and the bandwidth of disks without an I/O scheduler cannot be bounded from here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from malletrain.launch.supervisor import descendants
from malletrain.memory.folder import bytes_below, memory_limit
from malletrain.protocol.site_rules import IoPriority, SharingRules

log = logging.getLogger("malletrain.agent")

CHECK_EVERY_S = 2.0
"""Time between two measurements of a lease's memory, seconds."""
CHECKS_OVER = 2
"""Number of measurements in a row above the slot's memory after which its job is ended. What a
process needs for a moment while it starts another one is not held against it.
"""
CONFINED_FACTOR = 1.25
"""Maximum limit of a control group that counts as the scheduler's bound of a slot, as a multiple of
the slot's memory: schedulers allow a little more than requested (AllowedRAMSpace of Slurm). A
higher one is a limit of the host.
"""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30, "s390x": 282}
"""Number of the system call ioprio_set(2), which C libraries do not have, by architecture."""
_IO_PRIORITIES: dict[IoPriority, int] = {"low": 2 << 13 | 7, "idle": 3 << 13}
"""Class and level as ioprio_set(2) encodes them."""
_IO_OF_PROCESS = 1
_PSS = re.compile(rb"Pss:\s+(\d+) kB")
_MAPPING = re.compile(rb"[0-9a-f]+-[0-9a-f]+ ")
_NUMBER = re.compile(r"\.(\d+)$")


@dataclass(frozen=True)
class SlotBounds:
    """What a lease has of its host."""

    cpus: int
    """Processors of its slot."""
    memory_bytes: int
    """Memory of its slot, bytes."""
    rules: SharingRules = field(default_factory=SharingRules)
    """How it behaves towards other jobs."""


def chosen_cpus(allowed: Collection[int], cpus: int, node: str) -> frozenset[int]:
    """Return the processors to which a lease restricts itself: as many as its slot has.

    If the scheduler confines jobs to processors, the lease has no more than its own, and these are
    returned. If it does not, jobs are confined to none, so the kernel moves others away from those
    that a lease uses. Slots of one kind use different ones, by their numbers.

    Args:
        allowed: processors that the lease may use.
        cpus: processors of its slot.
        node: name of the slot.
    """
    if len(allowed) <= cpus:
        return frozenset(allowed)
    ordered = sorted(allowed)
    number = _NUMBER.search(node)
    first = int(number[1]) * cpus if number else 0
    return frozenset(ordered[(first + index) % len(ordered)] for index in range(cpus))


def restrict(bounds: SlotBounds, node: str) -> None:
    """Limit this process and those that it starts to the processors of its slot, and lower their
    priorities. Each of these that the kernel refuses is logged, and the others still apply.

    Args:
        bounds: what the lease has of its host.
        node: name of the slot.
    """
    rules = bounds.rules
    if rules.bound_cpus:
        _try("its processors", lambda: _bind(bounds.cpus, node))
    if rules.niceness:
        _try("its niceness", lambda: os.nice(rules.niceness))
    _try("its I/O priority", lambda: set_io_priority(rules.io_priority))


def _bind(cpus: int, node: str) -> None:
    allowed = os.sched_getaffinity(0)
    chosen = chosen_cpus(allowed, cpus, node)
    if chosen != allowed:
        os.sched_setaffinity(0, chosen)


def _try(subject: str, call: Callable[[], object]) -> None:
    try:
        call()
    except OSError as error:
        log.warning("the lease goes on without the limit of %s: %s", subject, error)


def set_io_priority(priority: IoPriority) -> None:
    """Set the I/O priority of this process and of those that it starts. Raises OSError."""
    value, call = _IO_PRIORITIES.get(priority), _IOPRIO_SET.get(platform.machine())
    if value is None or call is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call, _IO_OF_PROCESS, 0, value) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ioprio_set: {os.strerror(number)}")


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes, bytes. A page that several share counts for each."""
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        except (OSError, IndexError):  # it has ended
            continue
    return total


def proportional_bytes(pids: Iterable[int], folder: Path | None = None) -> int:
    """Return the memory of processes, bytes, in which a page that several processes share counts
    once in all (Pss of proc_pid_smaps(5)). Slower than :func:`resident_bytes`, by milliseconds a
    gigabyte.

    Args:
        pids: the processes.
        folder: a folder whose files do not count; None for none.
    """
    total = 0
    left_out = b" " + os.fsencode(folder) + b"/" if folder is not None else b""
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/smaps").read_bytes()
        except OSError:  # it has ended
            continue
        counts = True
        for line in maps.splitlines():
            if _MAPPING.match(line):
                counts = not left_out or left_out not in line
            elif counts and (match := _PSS.match(line)):
                total += int(match[1]) * 1024
    return total


def lease_bytes(folder: Path | None, most: int) -> int:
    """Return the memory of this process, of its descendants, and of its snapshots in memory, bytes.
    The value is exact only if it is above ``most``; below, shared pages count repeatedly.

    Args:
        folder: the lease's folder in shared memory; None if there is none.
        most: memory of the slot, bytes.
    """
    pids = [os.getpid(), *descendants(os.getpid())]
    files = bytes_below(folder)
    total = resident_bytes(pids) + files
    return total if total <= most else proportional_bytes(pids, folder) + files


class MemoryWatch:
    """Compares the memory of a lease with its slot. The caller measures, because that can take a
    while.

    Args:
        bounds: what the lease has of its host; None for a whole node.
        confined_bytes: memory to which the main scheduler confines the lease, bytes; None if it
            does not.
    """

    def __init__(self, bounds: SlotBounds | None, confined_bytes: int | None) -> None:
        self.most = (
            bounds.memory_bytes
            if bounds is not None
            and bounds.rules.bound_memory
            and (confined_bytes is None or confined_bytes > bounds.memory_bytes * CONFINED_FACTOR)
            else None
        )
        """Memory that the lease may use, bytes; None if it is not measured."""
        self._over = 0

    def verdict(self, used: int) -> str:
        """Return why the job has to end, after a measurement of ``used`` bytes; empty if it may go
        on.
        """
        if self.most is None or used <= self.most:
            self._over = 0
            return ""
        self._over += 1
        if self._over < CHECKS_OVER:
            return ""
        self._over = 0
        return (
            f"The job uses {used >> 20} MiB of memory on this node, and its slot has "
            f"{self.most >> 20} MiB. Use smaller batches or fewer loader workers, or a kind of "
            "slots with more memory."
        )


def watch_of(
    bounds: SlotBounds | None, confined: Callable[[], int | None] = memory_limit
) -> MemoryWatch:
    """Return the watch of this lease.

    Args:
        bounds: what the lease has of its host; None for a whole node.
        confined: returns the memory to which the main scheduler confines this process, bytes.
    """
    return MemoryWatch(bounds, confined() if bounds is not None else None)
