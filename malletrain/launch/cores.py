"""The cores that a lease has, and how many threads each worker process uses.

Decides the number of threads of a worker from the cores that this process may use, which are not
those of the host: a lease may have a part of them. A number that the user has chosen is not
changed. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of a process. OpenMP, torch, MKL, OpenBLAS and
numexpr read it.
"""


def allowed_cores() -> int:
    """Returns the number of cores that this process may use: its affinity, and the quota of its
    control group (cgroup v2, cpu.max).
    """
    return cores_within(len(os.sched_getaffinity(0)), _quotas())


def cores_within(affinity: int, quotas: Iterable[str]) -> int:
    """Returns the number of cores that a process may use, at least 1.

    Args:
        affinity: number of processors in its affinity mask.
        quotas: content of ``cpu.max`` of each of its control groups: quota and period in
            microseconds, or ``max`` and the period.
    """
    count = affinity
    for text in quotas:
        try:
            quota, period = map(int, text.split())
        except ValueError:  # "max"
            continue
        if period > 0:
            count = min(count, quota // period)
    return max(1, count)


def _quotas() -> list[str]:
    """Returns the content of ``cpu.max`` of this process's control group and of those above it."""
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
    """Returns the number of threads of each worker; 0 if the user has chosen it.

    Args:
        core_count: number of cores of the lease.
        processes: number of worker processes of the job on the node.
        environment: environment of the job.
    """
    if environment.get(THREADS_VARIABLE, "").strip():
        return 0
    return max(1, core_count // max(1, processes))


def set_threads(processes: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the number of threads of the workers that this launcher starts, in the environment that
    they inherit. ``processes``: number of worker processes of the job on the node.
    """
    threads = threads_per_worker(allowed_cores(), processes, environment)
    if threads:
        environment[THREADS_VARIABLE] = str(threads)


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
