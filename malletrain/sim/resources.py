"""Resources that a job holds on its nodes, as Slurm and PBS write them in their accounting. Pure.

Decides what their texts mean: units, double entries, and what belongs to which node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from malletrain.sim.workloads import WorkloadError


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


_KINDS = ("ngpus", "ncpus", "mem")
"""What PBS calls the fields of :class:`Resources`."""


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
