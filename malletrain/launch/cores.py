"""The cores that a lease has, and how many threads each worker process uses.

Decides the number of threads of a worker from the cores that this process may use, which are not
those of the host: a lease may have a part of them. The hardware threads of a core count as one
core, because a second thread of computation there makes the first one slower. A number that the
user has chosen is not changed. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from malletrain.protocol import env

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of a process. OpenMP, torch, MKL, OpenBLAS and
numexpr read it.
"""


def allowed_processors(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processors that this process may use, as the main scheduler counts
    them: its affinity, the quota of its control group (cgroup v2, cpu.max), and the lease's slot.
    ``environment``: that of the launcher, which names the slot's number.
    """
    slot = environment.get(env.SLOT_CPUS, "")
    return cores_within(len(os.sched_getaffinity(0)), _quotas(), slot)


def allowed_cores(environment: Mapping[str, str] = os.environ) -> int:
    """As :func:`allowed_processors`, but the hardware threads of one core count once."""
    affinity = os.sched_getaffinity(0)
    core_count = distinct_cores(affinity, _siblings(affinity))
    slot = environment.get(env.SLOT_CPUS, "")
    return cores_within(core_count, _quotas(), slot, len(affinity) // core_count)


def distinct_cores(processors: Iterable[int], siblings: Mapping[int, str]) -> int:
    """Return on how many cores ``processors`` are.

    Args:
        processors: numbers of processors (hardware threads).
        siblings: processor → content of its ``thread_siblings_list``, the same for all hardware
            threads of a core. A processor that is absent is a core of its own.
    """
    return len({siblings.get(number, "").strip() or number for number in processors})


def _siblings(processors: Iterable[int]) -> dict[int, str]:
    texts = {}
    for number in processors:
        folder = f"/sys/devices/system/cpu/cpu{number}/topology"
        try:
            with open(f"{folder}/thread_siblings_list") as file:
                texts[number] = file.read()
        except OSError:
            pass
    return texts


def cores_within(
    affinity: int, quotas: Iterable[str], slot: str = "", threads_per_core: int = 1
) -> int:
    """Return the number of cores that a process may use, at least 1.

    Args:
        affinity: number of cores in its affinity mask.
        quotas: content of ``cpu.max`` of each of its control groups: quota and period in
            microseconds, or ``max`` and the period.
        slot: number of processors of the lease's slot; empty for a whole node.
        threads_per_core: number of hardware threads of a core, each of which is a processor.
    """
    count = affinity
    if slot.isdecimal() and int(slot) > 0:
        count = min(count, int(slot) // threads_per_core)
    for text in quotas:
        try:
            quota, period = map(int, text.split())
        except ValueError:  # "max"
            continue
        if period > 0:
            count = min(count, quota // period)
    return max(1, count)


def _quotas() -> list[str]:
    """Return the content of ``cpu.max`` of this process's control group and of those above it."""
    quotas = []
    try:
        with open("/proc/self/cgroup") as file:
            paths = [line[3:].strip() for line in file if line.startswith("0::")]
    except OSError:
        return []
    for path in paths:
        while path:
            try:
                with open(f"/sys/fs/cgroup{path}/cpu.max") as file:
                    quotas.append(file.read())
            except OSError:
                pass
            path = path.rstrip("/").rpartition("/")[0]
    return quotas


def threads_per_worker(core_count: int, processes: int, environment: Mapping[str, str]) -> int:
    """Return the number of threads of each worker; 0 if the user has chosen it.

    Args:
        core_count: number of cores of the lease.
        processes: number of worker processes of the job on the node.
        environment: environment of the job.
    """
    if environment.get(THREADS_VARIABLE, "").strip():
        return 0
    return max(1, core_count // max(1, processes))


def apply_threads(environment: Mapping[str, str], torch: object | None) -> None:
    """Make torch use the number of threads of ``environment`` in a process that has imported torch
    with another environment: a fork of a fork server. Does nothing if that number is not a whole
    number from 1.

    Args:
        environment: environment of the process.
        torch: the imported module; None if it is not imported.
    """
    count = environment.get(THREADS_VARIABLE, "").strip()
    set_number = getattr(torch, "set_num_threads", None)
    if set_number is not None and count.isdecimal() and int(count) > 0:
        set_number(int(count))
