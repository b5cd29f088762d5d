"""The hosts of a machine: their GPUs, CPUs and memory, from the command line and from a file, and
what jobs hold on each, from a log that says it by node or as a sum.

Decides which of several statements about a host counts, and how the sum of a job's resources is
divided among its nodes. It does not guess what nobody states.
"""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from malletrain.config.units import UnitError, parse_size
from malletrain.sim.logged_jobs import JobLog, LogJob, Resources, pbs_size
from malletrain.sim.observation import Observation
from malletrain.sim.text_files import first_line, lines_of, read_text
from malletrain.sim.workloads import WorkloadError
from scavenger.hostlist import HostlistError, expand

NODES_FILE = "sinfo --Node --format='%N|%c|%m|%G'"
"""Command whose output :func:`read_hosts` reads."""


@dataclass(frozen=True, slots=True)
class HostSize:
    """What a host has; None where nobody states it."""

    gpus: int | None = None
    cpus: int | None = None
    memory: int | None = None
    """Bytes."""


@dataclass(frozen=True)
class SizeRules:
    """An amount of one resource by host, from the command line."""

    by_name: Mapping[str, int] = field(default_factory=dict)
    """Hosts that a list names."""
    by_pattern: tuple[tuple[str, int], ...] = ()
    """Patterns with ``*`` or ``?``; the first that matches counts."""
    default: int | None = None
    """Every other host."""

    @classmethod
    def parse(cls, option: str, texts: Sequence[str], is_size: bool = False) -> SizeRules:
        """Return the rules in texts such as ``4``, ``gpu[01-40]=4`` and ``a100-*=8``.

        Args:
            option: name of the option, for errors.
            texts: its values.
            is_size: whether amounts are sizes such as ``512 GB``; else they are numbers.

        Raises:
            WorkloadError: a text is none of these; the message names the option.
        """
        by_name: dict[str, int] = {}
        patterns: list[tuple[str, int]] = []
        default = None
        for text in texts:
            hosts, equals, amount = text.rpartition("=")
            try:
                number = parse_size(amount) if is_size else _count(amount)
                if not equals:
                    default = number
                elif "*" in hosts or "?" in hosts:
                    patterns.append((hosts, number))
                else:
                    by_name |= dict.fromkeys(expand(hosts), number)
            except (HostlistError, UnitError) as error:
                raise WorkloadError(f"{option} {text}: {error}") from None
        return cls(by_name, tuple(patterns), default)

    def of(self, host: str) -> int | None:
        """Return the amount of this host; None if no rule applies."""
        if host in self.by_name:
            return self.by_name[host]
        matching = (amount for pattern, amount in self.by_pattern if fnmatchcase(host, pattern))
        return next(matching, self.default)


@dataclass(frozen=True)
class Hosts:
    """What is stated about the hosts of a machine. Options take precedence over the file."""

    gpus: SizeRules = SizeRules()
    cpus: SizeRules = SizeRules()
    memory: SizeRules = SizeRules()
    file: str = ""
    """Path of the file; empty if there is none."""
    listed: Mapping[str, HostSize] = field(default_factory=dict)
    """The hosts of the file."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line of each host of the file; empty for JSON."""

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts that the file or a list of hosts names."""
        named = (self.listed, self.gpus.by_name, self.cpus.by_name, self.memory.by_name)
        return tuple(dict.fromkeys(name for names in named for name in names))

    def largest_cpus(self) -> int | None:
        """Return the CPUs of the largest host; None if nobody states any."""
        sizes = [self.of(name).cpus for name in self.names]
        sizes += [self.cpus.default, *(cpus for _, cpus in self.cpus.by_pattern)]
        return max((cpus for cpus in sizes if cpus is not None), default=None)

    def require_forms_of(self, names: Iterable[str]) -> None:
        """Check that no host is one of ``names``, those of the log, in another form: it would count
        twice, and once as idle.

        Raises:
            WorkloadError: a host and one of the log differ by a domain that only one of them has,
                or by capital letters.
        """
        used = set(names)
        forms = {name.lower(): name for name in used}
        forms |= {name.partition(".")[0].lower(): name for name in used if _has_domain(name)}
        for host in self.names:
            short = host.partition(".")[0] if _has_domain(host) else host
            other = forms.get(host.lower()) or forms.get(short.lower(), host)
            if host in used or other == host or (_has_domain(host) and _has_domain(other)):
                continue
            where = self.place(host) if host in self.listed else "An option"
            raise WorkloadError(
                f"{where}: {host} is called {other} in the log; use the names of the log, or the "
                "host would count twice."
            )

    def idle_patterns(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that match none of these hosts."""
        patterns = dict.fromkeys(
            pattern
            for rules in (self.gpus, self.cpus, self.memory)
            for pattern, _ in rules.by_pattern
        )
        return [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]

    def place(self, host: str) -> str:
        """Return the file and, if it has lines of hosts, the line of this host, for sentences."""
        return f"{self.file}, line {self.lines[host]}" if host in self.lines else self.file

    def of(self, host: str) -> HostSize:
        """Return what is stated about this host."""
        listed = self.listed.get(host, HostSize())
        gpus, cpus, memory = (rules.of(host) for rules in (self.gpus, self.cpus, self.memory))
        return HostSize(
            listed.gpus if gpus is None else gpus,
            listed.cpus if cpus is None else cpus,
            listed.memory if memory is None else memory,
        )


def _has_domain(host: str) -> bool:
    """Return whether this is a name with a domain, and no address such as 10.0.0.7."""
    return "." in host and not host.partition(".")[0].isdecimal()


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise UnitError(f"'{text}' is no number.")
    return int(text)


def read_hosts(path: str | Path) -> Hosts:
    """Read a file of hosts: the output of :data:`NODES_FILE` or of ``pbsnodes -a -F json``, or a
    table with bars or commas and the columns ``node`` (a host or a list of them), ``gpus``,
    ``cpus`` and ``memory`` (such as ``512 GB``; at least one of the three).

    Raises:
        WorkloadError: the file cannot be read, or says two things of a host; the message names the
            line.
    """
    if first_line(path).lstrip().startswith("{"):
        return _pbsnodes(path)
    listed: dict[str, HostSize] = {}
    lines: dict[str, int] = {}
    for line, name, size in _table(path):
        if listed.setdefault(name, size) != size:
            raise WorkloadError(
                f"{path}, line {line}: {name} has other resources than in line {lines[name]}."
            )
        lines.setdefault(name, line)
    if not listed:
        raise WorkloadError(f"{path}: The file has no host.")
    return Hosts(file=str(path), listed=listed, lines=lines)


_COLUMNS = {
    "node": "node",
    "nodelist": "node",
    "gpus": "gpus",
    "gres": "gres",
    "cpus": "cpus",
    "memory": "memory",
}
"""Column, in lower case, to what it contains."""


def _table(path: str | Path) -> Iterator[tuple[int, str, HostSize]]:
    """Yield (line, host, its size)."""
    kinds: list[str] = []
    bars = False
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        bars = bars or (not kinds and "|" in line)
        words = line.strip().split("|") if bars else next(csv.reader([line.strip()]))
        words = [word.strip() for word in words]
        if not kinds:
            kinds = [_COLUMNS.get(word.lower(), "") for word in words]
            if "node" not in kinds or not {"gpus", "gres", "cpus", "memory"} & set(kinds):
                raise WorkloadError(
                    f"{path}, line {number}: The first line has to name the columns node, gpus, "
                    f"cpus and memory; or give the output of {NODES_FILE}."
                )
            continue
        if len(words) != len(kinds):
            raise WorkloadError(
                f"{path}, line {number}: There are {len(words)} columns instead of {len(kinds)}."
            )
        values = {kind: word for kind, word in zip(kinds, words, strict=True) if kind and word}
        try:
            size = HostSize(
                _gres(values["gres"]) if "gres" in values else _optional(values.get("gpus")),
                _optional(values.get("cpus")),
                _memory(values["memory"]) if "memory" in values else None,
            )
            for name in expand(values.get("node", "")):
                yield number, name, size
        except (HostlistError, UnitError) as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None


def _optional(text: str | None) -> int | None:
    return None if text is None else _count(text)


def _memory(text: str) -> int:
    """Return bytes. sinfo prints MiB without a unit, with ``+`` if nodes of a line differ."""
    mebibytes = text.rstrip("+")
    return int(mebibytes) * 2**20 if mebibytes.isdecimal() else parse_size(text)


_GRES = re.compile(r"gpu(?::[^:,()]+)?:(\d+)(?:\([^)]*\))?")


def _gres(text: str) -> int:
    """Return the number of GPUs in a list of generic resources such as ``gpu:a100:4(S:0-1)``."""
    return sum(int(count) for count in _GRES.findall(text))


def _pbsnodes(path: str | Path) -> Hosts:
    """Return the hosts in the output of ``pbsnodes -a -F json``, with the sum of their vnodes."""
    try:
        vnodes = json.loads(read_text(path))["nodes"]
        totals: dict[str, Resources] = {}
        for vnode, state in vnodes.items():
            available = state.get("resources_available", {})
            host = available.get("host", vnode)
            size = Resources(
                int(available.get("ngpus", 0)),
                int(available.get("ncpus", 0)),
                pbs_size(str(available.get("mem", 0))),
            )
            totals[host] = totals.get(host, Resources()) + size
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise WorkloadError(
            f"{path}: This is no output of 'pbsnodes -a -F json' ({error})."
        ) from None
    return Hosts(
        file=str(path),
        listed={
            host: HostSize(size.gpus, size.cpus, size.memory)
            for host, size in totals.items()
            if size != Resources()
        },
    )


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
