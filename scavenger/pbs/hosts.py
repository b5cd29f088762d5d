"""Reads the resources of PBS hosts and how much of them jobs use. Needed where leases are slots.

The amounts are the sums of ``resources_available`` and ``resources_assigned`` over the vnodes of a
host, because PBS can divide a chunk among vnodes of one host, those without CPUs included. PBS
starts jobs on free vnodes only: of a vnode that is ``job-busy`` (jobs have all its CPUs) or
``job-exclusive``, no GPU and no memory is idle. A resource of a vnode can be that of another one
(``ngpus = @c1``). It then counts once. What jobs have of it is shown at ``c1`` if qmgr has set it,
and at the vnodes of the jobs if it comes from MoM's definition of vnodes (OpenPBS 23.06). Of a
vnode's memory only whole megabytes count, as for leases of whole nodes. Pure;
:mod:`scavenger.batch.slots` decides which slots are idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scavenger.batch.slots import CPUS, MEMORY_MB, Amounts, HostResources, Neighbour
from scavenger.pbs.job import sum_of
from scavenger.pbs.parse import PbsJob, RawNode, number_of, text_of, words_of
from scavenger.pbs.state import HostVnodes, without_cpus

NAMES = {"gpu": "ngpus", CPUS: "ncpus", MEMORY_MB: "mem"}
"""Resource of a slot → PBS's name."""
EXCLUSIVE_SHARING = ("force_excl", "force_exclhost")
"""Values of a vnode's ``sharing`` that give it to one job at a time, whatever jobs request."""
_ARRAY, _SUBJOB = re.compile(r"(\d+)\[\]"), re.compile(r"(\d+)\[\d+\]")
"""The beginning of the id of an array, and of one of its subjobs."""


def read_hosts(
    hosts: Mapping[str, HostVnodes],
    nodes: Mapping[str, RawNode],
    jobs: Iterable[PbsJob] = (),
) -> dict[str, HostResources]:
    """Return host → its resources.

    Args:
        hosts: host → its vnodes with CPUs.
        nodes: all vnodes. Those without CPUs can have GPUs and memory of their host.
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
    bare = without_cpus(nodes)
    sharers: dict[tuple[str, str], list[RawNode]] = {}
    for node in nodes.values():
        for resource, pbs_name in NAMES.items():
            if owner := _owner(node, pbs_name):
                sharers.setdefault((resource, owner), []).append(node)
    result = {}
    for host, vnodes in hosts.items():
        total, used = _amounts([*vnodes, *bare.get(host, ())], nodes, sharers)
        result[host] = HostResources(total, used, tuple(neighbours.get(host, ())), _closed(vnodes))
    return result


def _owner(node: RawNode, pbs_name: str) -> str:
    """Return the vnode whose resource this vnode uses; empty if it has its own."""
    value = node.resources_available.get(pbs_name)
    return value[1:] if isinstance(value, str) and value.startswith("@") else ""


def _amounts(
    vnodes: HostVnodes,
    nodes: Mapping[str, RawNode],
    sharers: Mapping[tuple[str, str], Sequence[RawNode]],
) -> tuple[Amounts, Amounts]:
    """Return (total, used) of one host. What no free vnode can give to a job counts as used.

    Args:
        vnodes: all vnodes of the host.
        nodes: all vnodes.
        sharers: (resource of a slot, vnode) → the vnodes that use this resource of that vnode.
    """
    total, used = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for resource, pbs_name in NAMES.items():
        reachable: dict[str, bool] = {}
        for name, node in vnodes:
            owner = _owner(node, pbs_name) or name
            reachable[owner] = reachable.get(owner, False) or text_of(node.state) == "free"
        for owner, is_reachable in reachable.items():
            if owner not in nodes:
                continue
            node = nodes[owner]
            has = _amount(resource, node.resources_available)
            total[resource] += has
            used[resource] += (
                sum(
                    _amount(resource, each.resources_assigned, round_up=True)
                    for each in (node, *sharers.get((resource, owner), ()))
                )
                if is_reachable
                else has
            )
    return total, used


def _amount(resource: str, part: Mapping[str, Any], round_up: bool = False) -> int:
    """Return the amount of a slot's resource in ``resources_available`` or ``resources_assigned``.
    ``round_up``: whether a part of a megabyte counts as one.
    """
    if resource == MEMORY_MB:
        return _megabytes(part, round_up)
    return int(number_of(part.get(NAMES[resource], 0)))


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
        sharing = text_of(node.sharing)
        if sharing in EXCLUSIVE_SHARING:
            return f"PBS gives it to one job at a time (sharing = {sharing})"
    if all("job-exclusive" in text_of(node.state).lower() for _, node in vnodes):
        return "a job has exclusive use of it"
    return ""
