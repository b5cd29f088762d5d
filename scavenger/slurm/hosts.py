"""Parses Slurm's report about the resources of hosts and the jobs on them, where leases are slots.

Read only where a site names kinds of slots: ``scontrol show node -o -d`` for what each host has and
what jobs have of it, and one more squeue for the jobs on hosts of which a kind asks whose they are.
Pure; :mod:`scavenger.batch.slots` decides which slots are idle.

A host's processors are its effective ones (``CPUEfctv``: without those that slurmd keeps for
itself), its memory is ``RealMemory`` less ``MemSpecLimit``. Where Slurm does not allocate memory
(``SelectTypeParameters`` without ``CR_Memory``) it counts none as used.

``FreeMem`` is the memory that slurmd last found unused (``freeram`` of sysinfo(2)), ``N/A`` if it
has not said. The page cache is not part of it, so that it is a lower bound of what processes can
get: on a host that has read many files it is small although nothing is short of memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from scavenger.batch.commands import require_complete, shorten
from scavenger.batch.slots import CPUS, MEMORY_MB, DeviceParts, HostResources, Neighbour
from scavenger.hostlist import HostlistError, expand
from scavenger.interface import SchedulerError
from scavenger.slurm.parse import OF_THIS_CLUSTER

HOSTS = ("scontrol", "-o", "-d", "--all", "show", "node")
"""The command that lists the hosts, also those of hidden partitions, which sinfo lists too."""
NEIGHBOUR_FIELDS = "%i|%u|%P|%N"
"""Job id, user, partition, nodes."""
NEIGHBOURS = (
    *("squeue", "-h", "-a", *OF_THIS_CLUSTER),
    *("-t", "running,suspended,completing,configuring,stopped", "-o"),
)
"""The command that lists the jobs on hosts, without its last word, ``MARK|NEIGHBOUR_FIELDS``."""
_KEY = re.compile(r"(?:^| )([A-Z][A-Za-z]+)=(\S*)")
_GRES = re.compile(r"(?:[^,(]|\([^)]*\))+")
_NO_TYPE = ":(null)"
"""In the place of the type of a GRES that has none (``shard:(null):2(IDX:0)``)."""
_FILL = re.compile(r"(\d+|-)/(\d+)")
_AS_A_WHOLE = "-"
"""In the place of the number of shards in use, for a GPU that a job has as a whole: ``-/2`` since
Slurm 26.05, ``0/2`` in earlier releases.
"""
GPU = "gpu"
SHARED = ("shard", "mps")
"""GRES that are parts of GPUs (gres.conf(5)). A job has those of one GPU of a node, unless
SelectTypeParameters has MULTIPLE_SHARING_GRES_PJ.
"""
_COUNT = re.compile(r"(\d+)([KMGTP]?)", re.IGNORECASE)
_FACTOR = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def read_hosts(text: str) -> dict[str, HostResources]:
    """Parse the output of :data:`HOSTS`. Raises SchedulerError if the text has another form."""
    hosts: dict[str, HostResources] = {}
    for line in require_complete(text, "scontrol show node").split("\n"):
        if not line.startswith("NodeName="):
            if line.strip() and not hosts:
                raise _unreadable(line)
            continue  # the rest of a comment or reason that contains a line break
        values: dict[str, str] = {}
        for match in _KEY.finditer(line):
            # A later one is part of a text that people write, such as the reason of a state.
            values.setdefault(match[1], match[2])
        try:
            name = values["NodeName"]
            cpus = int(values.get("CPUEfctv") or values["CPUTot"])
            memory = int(values["RealMemory"]) - int(values.get("MemSpecLimit") or 0)
            total = {CPUS: cpus, MEMORY_MB: memory, **read_gres(values.get("Gres", ""))}
            used = {
                CPUS: int(values["CPUAlloc"]),
                MEMORY_MB: int(values["AllocMem"]),
                **read_gres(values.get("GresUsed", "")),
            }
        except (KeyError, ValueError):
            raise _unreadable(line) from None
        # A job with --exclusive has all processors of its nodes, so that nothing fits beside it.
        # One with --exclusive=user has not, and makes its user the owner of the node.
        owner = values.get("Owner", "N/A").partition("(")[0]
        closed = "" if owner in ("N/A", "") else f"kept for jobs of {owner} (--exclusive=user)"
        free = values.get("FreeMem", "")
        parts = divided(total, used, values.get("GresUsed", ""))
        free_mb = int(free) if free.isdecimal() else None
        hosts[name] = HostResources(
            total,
            used,
            closed=closed,
            threads_per_core=processors_of_a_core(values),
            parts=parts,
            free_memory_mb=free_mb,
        )
    if not hosts:
        raise SchedulerError("scontrol show node lists no node.")
    return hosts


def processors_of_a_core(values: Mapping[str, str]) -> int:
    """Return how many of a node's processors are one core, from the fields of its line. A site can
    configure cores as processors although they have several threads.
    """
    names = ("CPUTot", "Sockets", "CoresPerSocket", "ThreadsPerCore")
    numbers = [int(text) if (text := values.get(name, "")).isdecimal() else 0 for name in names]
    if not all(numbers):
        return 1
    processors, sockets, cores, threads = numbers
    return max(1, min(threads, processors // (sockets * cores)))


def _unreadable(line: str) -> SchedulerError:
    return SchedulerError(f"The answer of scontrol show node cannot be understood: {shorten(line)}")


def read_gres(text: str) -> dict[str, int]:
    """Return GRES → count from ``gpu:a100:4(S:0-1),shard:8``. A typed one counts under its type,
    ``gpu:a100``, and under ``gpu``. A count that cannot be read is 0.
    """
    counts: dict[str, int] = {}
    for words, _ in _pieces(text):
        match = _COUNT.fullmatch(words[-1]) if len(words) > 1 else None
        number = int(match[1]) * _FACTOR[match[2].upper()] if match else int(len(words) == 1)
        name = words[0]
        counts[name] = counts.get(name, 0) + number
        if len(words) > 2:
            typed = ":".join(words[:2])
            counts[typed] = counts.get(typed, 0) + number
    return counts


def _pieces(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield (words between the colons, what stands in parentheses) of each GRES."""
    if text in ("", "(null)", "N/A"):
        return
    for piece in _GRES.findall(text.replace(_NO_TYPE, "")):
        words, _, detail = piece.partition("(")
        yield [w for w in words.split(":") if w != "no_consume"], detail.rstrip(")")


def divided(total: Mapping[str, int], used: dict[str, int], text: str) -> dict[str, DeviceParts]:
    """Return the GPUs of a host as :attr:`HostResources.parts`, for each GRES of :data:`SHARED`.

    A GPU of which a shard is allocated cannot be allocated as a whole, and the other way round. So
    such GPUs are added to ``used``. How much of a GPU is in use is told as ``(1/4,0/4)``, for each
    GPU, or not at all: then ``GresUsed`` names and counts the GPUs of which some shard is in use,
    whatever number that is (Slurm 22.05), and nothing of these counts as idle. Only since Slurm
    26.05 are the GPUs that are in use as a whole told apart. Before, each GPU without a shard in
    use may be one of them.

    Shards can be of some GPUs only. If Slurm does not list the GPUs, all have equally many; if that
    cannot be, because the number does not divide or is one a GPU, there are no parts.

    Args:
        total: what the host has.
        used: what is in use of it; changed in place.
        text: ``GresUsed``.
    """
    parts = {}
    gpus = total.get(GPU, 0)
    for name in SHARED:
        if not gpus or not total.get(name):
            continue
        listed: list[tuple[int, int]] = []
        whole: list[int] = []
        counted = 0
        for words, detail in _pieces(text):
            if words[0] == name:
                fills = [(taken, int(have)) for taken, have in _FILL.findall(detail)]
                whole += [have for taken, have in fills if taken == _AS_A_WHOLE]
                listed += [
                    (int(taken), have) for taken, have in fills if have and taken != _AS_A_WHOLE
                ]
                counted += 0 if fills else _count(words)
        touched = counted + sum(taken > 0 for taken, _ in listed)
        each = total[name] // gpus
        if listed or whole:
            devices = [*whole, *(have for _, have in listed)]
            untouched = sorted(have for taken, have in listed if not taken)
        else:
            devices = [each] * gpus if each > 1 else []
            untouched = devices[touched:]
        if sum(devices) == total[name]:
            hidden = max(0, used.get(GPU, 0) - len(whole))  # Any of the untouched may be these.
            idle = untouched[: max(0, len(untouched) - hidden)]
            partial = [have - taken for taken, have in listed if taken]
            parts[name] = DeviceParts(GPU, tuple(devices), (*idle, *partial))
            used[name] = total[name] - sum(parts[name].free)
        elif counted:
            used[name] = total[name]
        for resource in [r for r in total if r.partition(":")[0] == GPU]:
            used[resource] = min(total[resource], used.get(resource, 0) + touched)
    return parts


def _count(words: Sequence[str]) -> int:
    return int(words[-1]) if words[-1].isdecimal() else 0


def without_devices(hosts: Mapping[str, HostResources]) -> dict[str, HostResources]:
    """Return the hosts without their generic resources, for a Slurm whose steps have none of their
    own (``select/linear``: a step that requests some is refused, observed with 22.05).
    """
    plain = (CPUS, MEMORY_MB)
    return {
        name: replace(
            use,
            total={key: use.total[key] for key in plain},
            used={key: amount for key, amount in use.used.items() if key in plain},
            parts={},
        )
        for name, use in hosts.items()
    }


def with_neighbours(
    hosts: Mapping[str, HostResources], text: str, mark: str, own: Collection[str]
) -> dict[str, HostResources]:
    """Return the hosts with the jobs of others on them.

    Args:
        hosts: hosts without their jobs.
        text: output of the command :data:`NEIGHBOURS`.
        mark: the random mark at the beginning of each line.
        own: ids of the jobs of our leases.

    Raises:
        SchedulerError: the text has another form.
    """
    neighbours: dict[str, list[Neighbour]] = {}
    begin = mark + "|"
    for line in require_complete(text, "squeue").split("\n"):
        if not line.startswith(begin):
            continue
        fields = line.split("|")
        if len(fields) != 5:
            raise SchedulerError(f"The answer of squeue cannot be understood: {shorten(line)}")
        _, job, user, partition, nodes = fields
        if job in own or nodes in ("", "(null)"):
            continue
        try:
            names = expand(nodes)
        except HostlistError as error:
            raise SchedulerError(f"The answer of squeue cannot be understood: {error}") from None
        for name in names:
            neighbours.setdefault(name, []).append(Neighbour(user, partition))
    return {
        name: replace(use, neighbours=tuple(neighbours.get(name, ())))
        for name, use in hosts.items()
    }
