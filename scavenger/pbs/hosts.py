"""Reads the resources of PBS hosts and how much of them jobs use. Needed where leases are slots.

The amounts are the sums of ``resources_available`` and ``resources_assigned`` over the vnodes of a
host, because PBS can divide a chunk among vnodes of one host. Of a vnode's memory only whole
megabytes count, as for leases of whole nodes. Pure; :mod:`scavenger.batch.slots` decides which
slots are idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from scavenger.batch.slots import CPUS, MEMORY_MB, Amounts, HostResources, Neighbour
from scavenger.pbs.job import sum_of
from scavenger.pbs.parse import PbsJob, number_of, text_of, words_of
from scavenger.pbs.state import HostVnodes

NAMES = {"gpu": "ngpus", CPUS: "ncpus", MEMORY_MB: "mem"}
"""Resource of a slot → PBS's name."""
EXCLUSIVE_SHARING = ("force_excl", "force_exclhost")
"""Values of a vnode's ``sharing`` that give it to one job at a time, whatever jobs request."""
_ARRAY, _SUBJOB = re.compile(r"(\d+)\[\]"), re.compile(r"(\d+)\[\d+\]")
"""The beginning of the id of an array, and of one of its subjobs."""


def read_hosts(
    hosts: Mapping[str, HostVnodes], jobs: Iterable[PbsJob] = ()
) -> dict[str, HostResources]:
    """Return host → its resources.

    Args:
        hosts: host → its vnodes.
        jobs: the running jobs that are no leases, and job arrays (PBS names subjobs only at their
            vnodes). Needed only if a kind restricts its neighbours
            (:attr:`scavenger.batch.slots.SlotKind.beside`).
    """
    host_of_vnode = {vnode: host for host, vnodes in hosts.items() for vnode, _ in vnodes}
    neighbours: dict[str, list[Neighbour]] = {}
    array_of: dict[str, PbsJob] = {}
    for job in jobs:
        if match := _ARRAY.match(job.id):
            array_of[match[1]] = job
        for host in {host_of_vnode[v] for v in job.vnodes if v in host_of_vnode}:
            neighbours.setdefault(host, []).append(Neighbour(job.user, job.queue))
    for host, vnodes in hosts.items() if array_of else ():
        subjobs = {word for _, node in vnodes if node.jobs for word in words_of(node.jobs)}
        arrays = {match[1] for word in subjobs if (match := _SUBJOB.match(word))}
        for array in sorted(arrays & array_of.keys()):
            job = array_of[array]
            neighbours.setdefault(host, []).append(Neighbour(job.user, job.queue))
    return {
        host: HostResources(
            amounts_of([node.resources_available for _, node in vnodes]),
            amounts_of([node.resources_assigned for _, node in vnodes], round_up=True),
            tuple(neighbours.get(host, ())),
            _closed(vnodes),
        )
        for host, vnodes in hosts.items()
    }


def amounts_of(parts: Iterable[Mapping[str, Any]], round_up: bool = False) -> dict[str, int]:
    """Return the sum of the resources of vnodes.

    Args:
        parts: the resources of each vnode, as PBS names them.
        round_up: whether a part of a megabyte counts as one.
    """
    parts = list(parts)
    amounts = {}
    for name, pbs_name in NAMES.items():
        if name == MEMORY_MB:
            amounts[name] = sum(_megabytes(part, round_up) for part in parts)
        else:
            amounts[name] = int(sum(number_of(part.get(pbs_name, 0)) for part in parts))
    return amounts


def slot_chunk(amounts: Amounts) -> list[str]:
    """Return the resources of a slot as parts of a chunk: ``ncpus=8``, ``ngpus=1`` and
    ``mem=61440mb``. A slot without GPUs requests none.
    """
    words = [f"ncpus={amounts[CPUS]}"]
    if gpus := amounts.get("gpu", 0):
        words.append(f"ngpus={gpus}")
    return [*words, f"mem={amounts[MEMORY_MB]}mb"]


def _megabytes(part: Mapping[str, Any], round_up: bool) -> int:
    text = text_of(part.get("mem", ""))
    kilobytes = number_of(sum_of("mem", [{"mem": text}]) or 0)
    whole = int(kilobytes) // 1024
    # sum_of counts whole megabytes: a remainder of the text is a part of one.
    return whole + (round_up and text.endswith("kb") and number_of(text) % 1024 > 0)


def _closed(vnodes: HostVnodes) -> str:
    """Return why no further job can start on the host; empty if one can."""
    for _, node in vnodes:
        words = [word.strip() for word in text_of(node.state).lower().split(",")]
        if "job-exclusive" in words:
            return "a job has exclusive use of it"
        sharing = text_of(node.sharing)
        if sharing in EXCLUSIVE_SHARING:
            return f"PBS gives it to one job at a time (sharing = {sharing})"
    return ""
