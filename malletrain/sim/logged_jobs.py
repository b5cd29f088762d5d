"""Jobs in a log of real batch jobs, in order of submission, and the resources that they hold. Pure.

Decides what the texts of Slurm's and PBS's accounting mean: units, double entries, and what belongs
to which node. Decides nothing about files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from malletrain.sim.workloads import WorkloadError

_KINDS = ("ngpus", "ncpus", "mem")
"""What PBS calls the fields of :class:`Resources`."""
FILE_LINES = 2**32
"""More lines than a file of a log has."""


@dataclass(frozen=True, slots=True)
class Resources:
    """GPUs, CPU cores and memory: of a job, of its part on one node, or of a node."""

    gpus: int = 0
    """Number of GPUs."""
    cpus: int = 0
    """Number of CPUs, as the scheduler counts them."""
    memory: int = 0
    """Bytes."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.gpus + other.gpus, self.cpus + other.cpus, self.memory + other.memory)


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]?)", re.IGNORECASE)
_POWERS: dict[str, int] = {letter: power for power, letter in enumerate("KMGTPE", start=1)} | {
    "": 0
}


@lru_cache(maxsize=65536)
def slurm_tres(text: str) -> Resources | None:
    """Return the resources in a list of trackable resources of Slurm, such as
    ``billing=8,cpu=8,gres/gpu=2,gres/gpu:a100=2,mem=60G,node=1`` (sacct(1), AllocTRES); None if it
    is empty.

    ``gres/gpu`` counts all GPUs, ``gres/gpu:TYPE`` those of one type again. A site may track only
    some of them, so the larger sum counts. Memory without a unit is in MiB; K, M, G, … are powers
    of 1,024.

    Raises:
        WorkloadError: a count is no number; the message names the resource.
    """
    if not text.strip():
        return None
    amounts = {}
    for word in text.split(","):
        name, equals, amount = word.strip().partition("=")
        if not equals:
            raise WorkloadError(
                f"'{word}' is no trackable resource of Slurm, such as cpu=8, mem=60G or gres/gpu=4."
            )
        if name in ("cpu", "mem", "gres/gpu") or name.startswith("gres/gpu:"):
            amounts[name] = _slurm_amount(word.strip(), amount, name == "mem")
    typed = sum(amount for name, amount in amounts.items() if name.startswith("gres/gpu:"))
    return Resources(
        max(amounts.get("gres/gpu", 0), typed), amounts.get("cpu", 0), amounts.get("mem", 0)
    )


def _slurm_amount(word: str, amount: str, is_memory: bool) -> int:
    """Return a count, or bytes of memory."""
    match = _NUMBER.fullmatch(amount)
    if match is None:
        raise WorkloadError(f"'{word}' has no amount that Slurm writes, such as mem=60G or cpu=8.")
    power = _POWERS[match[2].upper()]
    if is_memory and not match[2]:
        power = _POWERS["M"]
    return round(float(match[1]) * float(1024**power))


def holds_part_of_gpu(text: str) -> bool:
    """Return whether these trackable resources of Slurm have parts of GPUs (shard, MPS) and no
    whole GPU.
    """
    return ("gres/shard" in text or "gres/mps" in text) and "gres/gpu" not in text


_PBS_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


def pbs_size(text: str) -> int:
    """Return the bytes of a size of PBS, such as ``62914560kb``, ``60gb`` or ``8mw`` (words of 8
    bytes). Without a unit it is in bytes (PBS Professional, Reference Guide, "Formats").

    Raises:
        WorkloadError: it is no such size.
    """
    match = _PBS_SIZE.fullmatch(text.strip())
    if match is None:
        raise WorkloadError(f"'{text}' is no size of PBS, such as 62914560kb or 60gb.")
    word = 8 if match[3].lower() == "w" else 1
    unit: int = 1024 ** _POWERS[match[2].upper()]
    return int(match[1]) * unit * word


def pbs_resources(
    fields: Mapping[str, str], chunk_hosts: Sequence[str]
) -> tuple[tuple[Resources, ...], Resources | None]:
    """Return what a job of PBS holds on each of its hosts, and what else it holds on all of them
    together.

    ``exec_vnode`` says what the job has on each vnode; a chunk of it, in parentheses, lies on one
    host. A resource that no vnode lists is taken from ``Resource_List``, else from
    ``resources_used`` (of a record of the end). A job that excludes others from its hosts
    (``place=exclhost``, or ``excl`` if a vnode is a host) has whole hosts.

    Args:
        fields: the fields of an accounting record.
        chunk_hosts: the hosts in ``exec_host``, one for each chunk.

    Returns:
        The resources of each host, in the order in which ``chunk_hosts`` first has it; empty if
        the record has none by host. The total of the others; None if the job has whole hosts, or
        the record does not say what it has.

    Raises:
        WorkloadError: an amount is no number or size.
    """
    chunks = _chunks(fields.get("exec_vnode", ""))
    placement = fields.get("Resource_List.place", "").split(":")
    names = dict.fromkeys(chunk_hosts)
    if "exclhost" in placement or (
        "excl" in placement and all(vnode in names for chunk in chunks for vnode, _, _ in chunk)
    ):
        return (), None
    by_host = dict.fromkeys(chunk_hosts, _NONE)
    kinds: set[str] = set()
    # A job that released nodes has other chunks than hosts.
    paired = len(chunks) == len(chunk_hosts)
    for number, chunk in enumerate(chunks):
        for vnode, resources, listed in chunk:
            host = chunk_hosts[number] if paired else vnode.partition("[")[0]
            host = host if host in names else chunk_hosts[0]
            by_host[host] = by_host[host] + resources if by_host[host] != _NONE else resources
            kinds |= listed
    others = {
        kind: fields.get(f"Resource_List.{kind}", fields.get(f"resources_used.{kind}"))
        for kind in _KINDS
        if kind not in kinds
    }
    listed_others = {kind: amount for kind, amount in others.items() if amount is not None}
    if not kinds and not listed_others:
        return (), None
    return (
        tuple(by_host.values()) if kinds else (),
        _pbs_amounts(listed_others) if listed_others else _NONE,
    )


_Vnode = tuple[str, Resources, frozenset[str]]
"""A vnode, the job's resources on it, and which of them the text lists."""


_NONE = Resources()


def _chunks(text: str) -> list[list[_Vnode]]:
    """Return the chunks of ``exec_vnode``, such as ``(n1:ncpus=8:ngpus=2)+(n2[0]:ncpus=4+n2[1]:
    ncpus=4)``.
    """
    return [
        [
            (name, *_vnode_resources(listed))
            for name, _, listed in (part.partition(":") for part in chunk.strip("()").split("+"))
        ]
        for chunk in text.split(")+(")
        if chunk.strip("()")
    ]


@lru_cache(maxsize=65536)
def _vnode_resources(text: str) -> tuple[Resources, frozenset[str]]:
    """Return the resources in a text such as ``ncpus=8:ngpus=2``, and which it lists. Jobs have
    many vnodes and few such texts.
    """
    amounts = dict(word.partition("=")[::2] for word in text.split(":"))
    listed = {kind: amounts[kind] for kind in _KINDS if kind in amounts}
    return _pbs_amounts(listed), frozenset(listed)


def _pbs_amounts(amounts: Mapping[str, str]) -> Resources:
    return Resources(
        _pbs_count("ngpus", amounts),
        _pbs_count("ncpus", amounts),
        pbs_size(amounts.get("mem", "0")),
    )


def _pbs_count(kind: str, amounts: Mapping[str, str]) -> int:
    text = amounts.get(kind, "0")
    if not text.isdecimal():
        raise WorkloadError(f"'{kind}={text}' is no number.")
    return int(text)


Lists = Literal["all", "running", "since", "submitted"]


@dataclass(frozen=True, slots=True)
class LogJob:
    """One job of a log. Times are in seconds since the first submission in the log."""

    submit_s: float
    """Submission."""
    start_s: float | None
    """Start; None if the log does not contain it."""
    run_s: float | None
    """Run time; None if the job still ran when the log ended."""
    nodes: int
    """Number of nodes."""
    names: tuple[str, ...] = ()
    """Names of the nodes; empty if the log does not contain them."""
    user: str = ""
    """Its user; empty if the log does not contain it."""
    allocated: Resources | None = None
    """Resources on all its nodes together, except those in ``per_node``. None if the job holds its
    nodes as a whole, or the log does not list its resources.
    """
    per_node: tuple[Resources, ...] = ()
    """Resources on each of ``names``; empty if the log does not list them by node."""
    line: int = field(default=0, compare=False)
    """Number of its file times :data:`FILE_LINES`, plus its line (:meth:`JobLog.place`)."""


@dataclass(frozen=True)
class JobLog:
    """The jobs of a log, in order of submission."""

    source: str
    """Kind of log."""
    jobs: tuple[LogJob, ...]
    """The jobs that ran."""
    nodes: int | None = None
    """Number of nodes of the machine; None if the log does not contain it."""
    skipped: int = 0
    """Number of entries of jobs that never ran or lack data."""
    lists: Lists = "all"
    """Jobs in the log (:mod:`malletrain.sim.observation`): ``all`` that ran; those that ran at some
    time during the log (``running``); those that ended or started ``since`` its first record; those
    ``submitted`` during the log.
    """
    since_s: float = 0.0
    """Time of the first record, seconds of the log; for ``since``."""
    zero: float | None = None
    """First submission, seconds since the epoch; None if the log has no dates."""
    notes: tuple[str, ...] = ()
    """Assumptions made while reading it, as sentences for the reader of a report."""
    lists_resources: bool = False
    """Whether it says what jobs hold on their nodes."""
    files: tuple[str, ...] = ()
    """Paths of its files."""
    nodes_ground: str = ""
    """Where the log says how many nodes the machine has, for sentences."""
    cpus_per_node: int | None = None
    """CPUs of a node; None if the log does not contain it, or counts nodes only."""
    cpus_ground: str = "as the log says"
    """How ``cpus_per_node`` is known, for sentences."""
    cpus_inferred: bool = False
    """Whether ``cpus_per_node`` follows from the sizes of jobs, so that nodes may have more."""

    def place(self, job: LogJob) -> str:
        """Return the file and line of a job, for sentences."""
        number, line = divmod(job.line, FILE_LINES)
        return f"{self.files[number]}, line {line}"


def first_known(job: LogJob) -> float:
    """Return when a job was submitted: when it started at the latest, whatever its log says."""
    return job.submit_s if job.start_s is None else min(job.submit_s, job.start_s)


def job_log(
    source: str,
    path: str | Path,
    jobs: Iterable[LogJob],
    nodes: int | None,
    skipped: int,
    files: Sequence[str | Path] = (),
) -> JobLog:
    """Return a log with these jobs, sorted, with times relative to the first submission.

    Args:
        source: kind of log.
        path: path of the file, for errors.
        jobs: jobs in any order; times in seconds.
        nodes: number of nodes of the machine, or None.
        skipped: number of entries left out.
        files: paths of its files; default: ``path`` alone.

    Raises:
        WorkloadError: there are no jobs.
    """
    begun = (replace(job, submit_s=first_known(job)) for job in jobs)
    ordered = sorted(begun, key=lambda job: (job.submit_s, job.start_s or 0.0))
    if not ordered:
        why = f"; all {skipped} entries are of jobs that never ran" if skipped else ""
        raise WorkloadError(f"{path}: The log has no job that ran{why}.")
    zero = ordered[0].submit_s
    moved = (
        replace(
            j,
            submit_s=j.submit_s - zero,
            start_s=None if j.start_s is None else j.start_s - zero,
        )
        for j in ordered
    )
    return JobLog(source, tuple(moved), nodes, skipped, files=tuple(map(str, files or (path,))))
