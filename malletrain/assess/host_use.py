"""What jobs hold on each host of a machine, from a log that says it by node or as a sum.

Decides how the sum of a job's resources is divided among its nodes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from malletrain.assess.hosts import Hosts, HostSize
from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.observation import Observation

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HostUse:
    """The jobs of one host, one entry each; times are seconds of the observation."""

    start: Floats
    end: Floats
    gpus: Integers
    cpus: Integers
    memory: Integers
    whole: Booleans
    """Whether the job has the whole host."""


class MachineUse:
    """What jobs hold on each host, in columns, because a log has millions of entries."""

    def __init__(
        self,
        log: JobLog,
        observed: Observation,
        hosts: Hosts,
        with_memory: bool = True,
    ) -> None:
        """Read the jobs.

        Args:
            log: jobs, of which those with names of nodes count.
            observed: interval that counts.
            hosts: what is stated about the hosts.
            with_memory: whether sums of memory are divided among nodes; else they are left out.
        """
        self._with_memory = with_memory
        self.duration_s = observed.end_s - observed.begin_s
        """Length of the observation, seconds."""
        self.hosts: dict[str, int] = {}
        """Host to its number."""
        self.first_jobs: dict[str, LogJob] = {}
        """The first job of each host."""
        self.evenly_spread_node_s = 0.0
        self.uneven_node_s = 0.0
        """That part of it where the GPUs are no multiple of the nodes."""
        self.whole_jobs = 0
        """Number of jobs that have their hosts as a whole."""
        self.unnamed_jobs = 0
        """Number of jobs without names of nodes."""
        self._hosts = hosts
        self._number = array("l")
        self._start, self._end = array("d"), array("d")
        self._gpus, self._cpus, self._memory = array("q"), array("q"), array("q")
        self._sizes: dict[str, HostSize] = {}
        for job in log.jobs:
            self._add(job, observed)
        numbers = np.asarray(self._number, dtype=np.int64)
        self._order = np.argsort(numbers, kind="stable")
        self._edges = np.searchsorted(numbers[self._order], np.arange(len(self.hosts) + 1))
        self._columns = [
            np.asarray(column)
            for column in (self._start, self._end, self._gpus, self._cpus, self._memory)
        ]

    def of(self, host: str) -> HostUse:
        """Return the use of a host, in any order of time."""
        number = self.hosts.get(host)
        rows = slice(0, 0) if number is None else slice(*self._edges[number : number + 2])
        start, end, gpus, cpus, memory = (column[self._order[rows]] for column in self._columns)
        whole = gpus < 0
        return HostUse(start, end, np.where(whole, 0, gpus), cpus, memory, whole)

    def _add(self, job: LogJob, observed: Observation) -> None:
        if job.start_s is None:
            return
        run_s = math.inf if job.run_s is None else job.run_s
        start = max(job.start_s, observed.begin_s) - observed.begin_s
        end = min(job.start_s + run_s, observed.end_s) - observed.begin_s
        if end <= start:
            return
        if not job.names:
            self.unnamed_jobs += 1
            return
        for name in job.names:
            if name not in self.hosts:
                self.hosts[name] = len(self.hosts)
                self.first_jobs[name] = job
        count = len(job.names)
        self._number.extend([self.hosts[name] for name in job.names])
        self._start.extend([start] * count)
        self._end.extend([end] * count)
        gpus, cpus, memory = self._parts(job, end - start)
        self._gpus.extend(gpus)
        self._cpus.extend(cpus)
        self._memory.extend(memory)

    def _parts(self, job: LogJob, seconds: float) -> tuple[list[int], list[int], list[int]]:
        """Return the GPUs, CPUs and memory of a job on each node; -1 GPUs: the whole node."""
        count = len(job.names)
        gpus, cpus, memory = ([0] * count for _ in range(3))
        if job.allocated is None and not job.per_node:
            self.whole_jobs += 1
            return [-1] * count, cpus, memory
        if job.allocated is not None:
            total = job.allocated
            if total.gpus:
                limits = [self._size(name).gpus for name in job.names]
                gpus = divided(total.gpus, limits)
                if count > 1 and gpus != limits:
                    self.evenly_spread_node_s += count * seconds
                    self.uneven_node_s += count * seconds if total.gpus % count else 0.0
            if total.cpus:
                cpus = divided(total.cpus, [self._size(name).cpus for name in job.names])
            if self._with_memory and total.memory:
                memory = divided(total.memory, [self._size(name).memory for name in job.names])
        if job.per_node:
            gpus = [each + part.gpus for each, part in zip(gpus, job.per_node, strict=True)]
            cpus = [each + part.cpus for each, part in zip(cpus, job.per_node, strict=True)]
            memory = [each + part.memory for each, part in zip(memory, job.per_node, strict=True)]
        return gpus, cpus, memory

    def _size(self, host: str) -> HostSize:
        if host not in self._sizes:
            self._sizes[host] = self._hosts.of(host)
        return self._sizes[host]


def states(use: HostUse, duration: float) -> tuple[Floats, tuple[Integers, ...]]:
    """Return when the use of a host changes, and what is in use between.

    Args:
        use: its jobs.
        duration: length of the observation, seconds.

    Returns:
        The edges of the intervals in which nothing changes (seconds), and for each interval the
        number of jobs, of those with the whole host, and the GPUs, CPUs and memory they hold.
    """
    times = np.concatenate([[0.0], use.start, use.end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    # The state after the last change of each moment.
    last = np.append(np.diff(times) > 0, True)
    within = times[last] < duration
    columns = (np.ones(len(use.start), np.int64), use.whole, use.gpus, use.cpus, use.memory)
    states = tuple(
        np.cumsum(np.concatenate([[0], column, -column.astype(np.int64)])[order])[last][within]
        for column in columns
    )
    return np.append(times[last][within], duration), states


def divided(total: int, limits: Sequence[int | None]) -> list[int]:
    """Return an even division of ``total`` that respects the limits.

    Args:
        total: number of units.
        limits: maximum of each part; None for no limit.

    Returns:
        The parts, which differ by at most 1 where no limit applies, the larger ones first. If
        ``total`` exceeds the limits, the rest is divided evenly in spite of them.
    """
    count = len(limits)
    if count == 1:
        return [total]
    parts, remainder = divmod(total, count)
    even = [parts + 1] * remainder + [parts] * (count - remainder)
    maxima = [math.inf if limit is None else limit for limit in limits]
    fits = all(part <= maximum for part, maximum in zip(even, maxima, strict=True))
    if fits or sum(maxima) < total:
        return even
    result = [0] * count
    remaining = total
    for position, k in enumerate(sorted(range(count), key=maxima.__getitem__)):
        share = -(-remaining // (count - position))
        result[k] = int(min(share, maxima[k]))
        remaining -= result[k]
    return result
