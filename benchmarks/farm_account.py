"""Computes the results of benchmarks/farm_peers.py from the records of tasks and main jobs. Runs
nothing, and knows no contender.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.main_jobs import MainRecord


@dataclass(frozen=True)
class Try:
    """One try of a task. Times in epoch seconds."""

    task: int
    node: str
    started: float
    ended: float
    finished: bool
    """Whether the task ended by itself; if not, it was interrupted at ``ended``."""


@dataclass(frozen=True)
class Account:
    """The results of a contender. Node-seconds are core-seconds divided by the cores of a node."""

    done: int
    """Number of tasks that were done."""
    seconds: float
    """From the submission to the end of the last task."""
    wasted_node_s: float
    """Work of interrupted tries, and of repeated tasks that had been done."""
    repeated: int
    """Number of tasks that were started more than once."""
    done_twice: int
    """Number of tasks that were completed more than once."""
    idle_node_s: float
    """Node-seconds of cores that neither main jobs nor tasks used while tasks waited."""
    free_node_s: float
    """Node-seconds without a main job."""
    main_jobs: int
    """Number of main jobs that arrived before the end."""
    main_wait_mean_s: float
    """Waits from a main job's submission to its first command, or to the end if that came first,
    seconds.
    """
    main_wait_median_s: float
    main_wait_p99_s: float
    main_wait_max_s: float


def tries_of(folder: Path) -> Iterator[Try]:
    """Yield the tries with records in ``folder``. The end of an interrupted one is the last change
    of its record.
    """
    for path in folder.iterdir():
        words = path.read_text().split()
        if len(words) < 2:
            continue  # interrupted while it wrote its first line
        finished = len(words) > 2
        ended = float(words[2]) if finished else path.stat().st_mtime
        yield Try(int(path.name.split("-")[0]), words[1], float(words[0]), ended, finished)


def account(
    tries: Sequence[Try],
    main: Sequence[MainRecord],
    *,
    begin: float,
    nodes: int,
    cores: int,
    tasks: int,
) -> Account:
    """Return the results of a farm.

    Args:
        tries: all tries of its tasks.
        main: the main jobs.
        begin: time of the farm's submission, epoch seconds.
        nodes: number of nodes of the machine.
        cores: number of cores of a node, which is the number of simultaneous tasks.
        tasks: number of tasks.
    """
    done_at: dict[int, float] = {}
    wasted_s = 0.0
    for one in sorted(tries, key=lambda one: one.ended):
        if one.finished and one.task not in done_at:
            done_at[one.task] = one.ended
        else:
            wasted_s += one.ended - one.started
    end = max(done_at.values(), default=begin)
    starts, ends = Counter(one.task for one in tries), Counter(t.task for t in tries if t.finished)
    idle_s, free_s = _idle(tries, main, done_at, begin, end, nodes, cores, tasks)
    waits = [
        min(end, end if record.started is None else record.started) - record.submitted
        for record in main
        if record.submitted < end
    ]
    return Account(
        done=len(done_at),
        seconds=end - begin,
        wasted_node_s=wasted_s / cores,
        repeated=sum(count > 1 for count in starts.values()),
        done_twice=sum(count > 1 for count in ends.values()),
        idle_node_s=idle_s,
        free_node_s=free_s,
        main_jobs=len(waits),
        main_wait_mean_s=statistics.fmean(waits) if waits else 0.0,
        main_wait_median_s=float(np.median(waits)) if waits else 0.0,
        main_wait_p99_s=float(np.percentile(waits, 99)) if waits else 0.0,
        main_wait_max_s=max(waits, default=0.0),
    )


def _idle(
    tries: Sequence[Try],
    main: Sequence[MainRecord],
    done_at: dict[int, float],
    begin: float,
    end: float,
    nodes: int,
    cores: int,
    tasks: int,
) -> tuple[float, float]:
    """Return the node-seconds that nobody used while tasks waited, and those without a main
    job.
    """
    changes: list[tuple[float, str, int, int]] = []
    for one in tries:
        changes += [(one.started, "task", one.task, 1), (one.ended, "task", one.task, -1)]
    for record in main:
        if record.started is not None:
            until = end if record.ended is None else record.ended
            changes += [
                (record.started, "main", 0, len(record.nodes)),
                (until, "main", 0, -len(record.nodes)),
            ]
    changes += [(at, "done", task, 0) for task, at in done_at.items()]
    changes.append((end, "end", 0, 0))
    running: Counter[int] = Counter()
    done: set[int] = set()
    used, idle_s, free_s, since = 0, 0.0, 0.0, begin
    for at, kind, task, change in sorted(changes):
        until = min(max(at, begin), end)
        busy = {number for number, count in running.items() if count}
        waiting = tasks - len(done | busy)
        free = nodes - used
        free_s += max(0, free) * (until - since)
        if waiting > 0:
            idle_s += max(0.0, free - sum(running.values()) / cores) * (until - since)
        since = until
        if kind == "task":
            running[task] += change
        elif kind == "main":
            used += change
        elif kind == "done":
            done.add(task)
    return idle_s, free_s
