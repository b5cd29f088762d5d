"""Evaluates the logs of the ranks of a training: samples repeated and lost, pauses, goodput.

Every rank appends two lines per step to a log of its own (:class:`benchmarks.peers_training.Log`):
``draw`` with its samples before the step, ``done`` when the step has counted. The samples of a
training are numbered in their order, each once, so that repeated and skipped samples are counted
and not estimated. Pure: logs in, figures out.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    time: float
    """Seconds since the epoch."""
    kind: str
    """``draw`` or ``done``."""
    step: int
    world: int
    rank: int
    samples: tuple[int, ...] = ()
    """Samples of a ``draw``."""


def lines_of(text: str) -> list[Line]:
    """Return the complete lines of a log, in order; SIGKILL may have cut the last one."""
    rows = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        time, kind, step, world, rank, *samples = line.split()
        numbers = tuple(map(int, samples))
        rows.append(Line(float(time), kind, int(step), int(world), int(rank), numbers))
    return rows


class Logs:
    """The logs of all processes of a training, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}
        self._lines: dict[Path, list[Line]] = {}

    def look(self, since: float = 0.0) -> list[list[Line]]:
        """Read new lines. Return the lines after ``since``, a list for each process."""
        for path in sorted(self.folder.glob("rank-*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._lines.setdefault(path, []).extend(lines_of(whole.decode()))
        return [
            lines[bisect_right(lines, since, key=lambda line: line.time) :]
            for lines in self._lines.values()
        ]


def trained(logs: Iterable[Sequence[Line]]) -> list[Line]:
    """Return the draws whose steps counted.

    A rank may be killed between the end of a step and its line, or learn of the end from others. A
    step of synchronous training needs every rank. So such a draw counts if the next ``done`` of the
    step came from other ranks of a group of the same size, and the samples were not drawn again.
    """
    logs = list(logs)
    done: dict[int, list[Line]] = {}
    for line in finished(logs):
        done.setdefault(line.step, []).append(line)
    counted = []
    for log in logs:
        for at, line in enumerate(log):
            if line.kind != "draw":
                continue
            after = log[at + 1] if at + 1 < len(log) else None
            if after is not None and after.kind == "done" and after.step == line.step:
                counted.append(line)
            elif all(x.step != line.step for x in log[at + 1 :]):
                later = [d for d in done.get(line.step, ()) if d.time >= line.time]
                if (
                    later
                    and later[0].world == line.world
                    and all(d.rank != line.rank for d in later if d.world == line.world)
                ):
                    counted.append(line)
    return counted


@dataclass(frozen=True)
class Samples:
    """Counts of the samples up to the end of the last step but one."""

    distinct: int
    """Number of different samples that were trained on."""
    repeated: int
    """Number of repetitions of samples."""
    lost: int
    """Number of skipped samples."""


def count(logs: Iterable[Sequence[Line]]) -> Samples:
    """Count the samples, without the last step, in which the ranks were stopped."""
    draws = trained(logs)
    last = max((d.step for d in draws), default=0)
    times = Counter(s for d in draws if d.step < last for s in d.samples)
    due = max(times, default=-1) + 1
    return Samples(len(times), sum(times.values()) - len(times), due - len(times))


def kept_between(logs: Iterable[Sequence[Line]], begin: float, end: float) -> int:
    """Return how many samples were trained on for the first time in this interval."""
    first: dict[int, float] = {}
    for draw in trained(logs):
        for sample in draw.samples:
            first[sample] = min(draw.time, first.get(sample, draw.time))
    return sum(begin <= time <= end for time in first.values())


def finished(logs: Iterable[Sequence[Line]]) -> list[Line]:
    """Return all ``done`` lines in the order of time."""
    return sorted((x for log in logs for x in log if x.kind == "done"), key=lambda x: x.time)


def pause(done: Sequence[Line], begin: float, end: float) -> float:
    """Return the longest time in ``begin`` … ``end`` without a finished step, counted from the last
    step before, seconds. ``done`` is in the order of time.
    """
    first = bisect_left(done, begin, key=lambda d: d.time)
    before = [d.time for d in done[max(0, first - 1) : first]]
    inside = [d.time for d in done[first : bisect_right(done, end, key=lambda d: d.time)]]
    times = [*(before or [begin]), *inside, *([] if inside else [end])]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def step_s(done: Sequence[Line]) -> float:
    """Return the usual duration of a step: the median between steps that rank 0 finished."""
    times = [d.time for d in done if d.rank == 0]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def usual_steps(logs: Iterable[Sequence[Line]]) -> dict[int, float]:
    """Return the same by the number of ranks, without the steps around a change."""
    done = [d for d in finished(logs) if d.rank == 0]
    usual: dict[int, list[float]] = defaultdict(list)
    for before, after in itertools.pairwise(done):
        if before.world == after.world and after.step == before.step + 1:
            usual[after.world].append(after.time - before.time)
    return {world: statistics.median(times) for world, times in usual.items()}


def goodput(samples: int, seconds: float, undisturbed: float) -> float:
    """Return the new samples per second, as a fraction of those of an undisturbed training."""
    return samples / seconds / undisturbed


def good_time(logs: Iterable[Sequence[Line]], begin: float, end: float) -> float:
    """Return the goodput: the time that the steps done for the first time in ``begin`` … ``end``
    take by themselves, as a fraction of that interval. The duration of a step is the median at its
    number of ranks.
    """
    lines = [log for log in logs if log]
    done = [d for d in finished(lines) if d.rank == 0]
    usual = usual_steps(lines)
    first: dict[int, Line] = {}
    counted = {(d.step, d.world) for d in trained(lines)}
    for d in done:
        if (d.step, d.world) in counted:
            first.setdefault(d.step, d)
    good = sum(usual.get(d.world, 0.0) for d in first.values() if begin <= d.time <= end)
    return good / (end - begin)
