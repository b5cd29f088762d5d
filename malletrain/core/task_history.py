"""The tasks of a farm over time: how many were done, had failed and ran. Pure.

Decides how much of it is kept: the counts of at most :data:`MAX_BUCKETS` intervals of equal
length, which doubles when there are more, and the tasks that ran longest. What it is computed from,
the start and the end of the last try of each task, is in the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappush, heappushpop
from typing import NamedTuple

from malletrain.core.task_queue import TaskState

MAX_BUCKETS = 240
"""Maximum number of intervals."""
FIRST_WIDTH_S = 1.0
"""Length of an interval at first, seconds."""
MAX_SLOWEST = 10
"""Number of done tasks that are kept because they ran longest."""


class TaskCounts(NamedTuple):
    """The tasks of a farm at one time."""

    time: float
    """Seconds since the epoch."""
    done: int
    failed: int
    running: int


@dataclass
class _Bucket:
    """What happened in one interval."""

    started: int = 0
    ended: int = 0
    done: int = 0
    failed: int = 0

    def add(self, other: _Bucket) -> None:
        self.started += other.started
        self.ended += other.ended
        self.done += other.done
        self.failed += other.failed


class _Buckets:
    """Intervals of equal length, by their number from the epoch on."""

    def __init__(self, width_s: float = FIRST_WIDTH_S) -> None:
        self.width_s = width_s
        self.of: dict[int, _Bucket] = {}

    def at(self, time: float) -> _Bucket:
        """Return the interval of a time, seconds since the epoch."""
        key = int(time // self.width_s)
        while key not in self.of:
            self.of[key] = _Bucket()
            if max(self.of) - min(self.of) < MAX_BUCKETS:
                break
            self._widen()
            key = int(time // self.width_s)
        return self.of[key]

    def copy(self) -> _Buckets:
        """Return a copy."""
        copy = _Buckets(self.width_s)
        copy.of = {key: replace(bucket) for key, bucket in self.of.items()}
        return copy

    def _widen(self) -> None:
        self.width_s *= 2
        narrow, self.of = self.of, {}
        for key, bucket in narrow.items():
            self.of.setdefault(key // 2, _Bucket()).add(bucket)


class TaskHistory:
    """The counts of one farm over time.

    Args:
        since: time of its submission, seconds since the epoch. Earlier times, of a node whose
            clock is wrong, count as this one.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._buckets = _Buckets()
        self._slowest: list[tuple[float, int]] = []

    def ended(self, number: int, started: float, ended: float, state: TaskState) -> None:
        """Count the end of a try.

        Args:
            number: number of the task.
            started: start of the try, seconds since the epoch.
            ended: its end.
            state: state of the task then.
        """
        ended = max(self._since, ended)
        started = min(max(self._since, started), ended)
        self._buckets.at(started).started += 1
        bucket = self._buckets.at(ended)
        bucket.ended += 1
        if state is TaskState.DONE:
            bucket.done += 1
            entry = (ended - started, -number)
            if len(self._slowest) < MAX_SLOWEST:
                heappush(self._slowest, entry)
            else:
                heappushpop(self._slowest, entry)
        elif state is TaskState.FAILED:
            bucket.failed += 1

    def put_back(self, count: int, now: float) -> None:
        """Count failed tasks that wait again."""
        if count:
            self._buckets.at(max(self._since, now)).failed -= count

    def slowest(self) -> list[int]:
        """Return the numbers of the done tasks that ran longest, the longest first."""
        return [-number for _, number in sorted(self._slowest, reverse=True)]

    def counts(self, running: Iterable[float] = ()) -> list[TaskCounts]:
        """Return the counts at the end of each interval in which something happened, and the zeros
        before the first one.

        Args:
            running: the starts of the tasks that run now, seconds since the epoch.
        """
        buckets = self._buckets.copy()
        for start in running:
            buckets.at(max(self._since, start)).started += 1
        total, counts = _Bucket(), list[TaskCounts]()
        for key in sorted(buckets.of):
            if not counts:
                counts.append(TaskCounts(key * buckets.width_s, 0, 0, 0))
            total.add(buckets.of[key])
            counts.append(
                TaskCounts(
                    (key + 1) * buckets.width_s,
                    total.done,
                    total.failed,
                    total.started - total.ended,
                )
            )
        return counts
