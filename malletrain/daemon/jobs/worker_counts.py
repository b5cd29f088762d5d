"""What follows from the cumulative counts that a job's workers report: the times of its steps over
the last minutes, and its reads through data caches. Pure: times come with the counts.

:class:`StepWindows` decides over which time the steps are averaged, and the averages of which ranks
are stored. :mod:`malletrain.core.step_times` says what the averages mean.

:class:`DataReads` decides which counts are added up and which are replaced by newer ones. They are
kept in memory only: unfinished jobs report again within seconds after a restart of the daemon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from malletrain.core.change_costs import reread_s
from malletrain.core.step_times import RankTimes, StepBreakdown, breakdown
from malletrain.protocol.messages import Progress
from malletrain.protocol.views import DataCacheView

MARK_S = 10.0
"""Minimum time between two counts that are kept, seconds. The newest breakdown is that of the last
one to two such intervals.
"""
MARKS = 30
"""Number of counts that are kept of each rank."""
REFRESH_S, REFRESH_SHARE = 2.0, 0.1
"""Minimum time between two computations of an average: seconds, or a share of the time since the
round's first counts if that is shorter.
"""
MIN_STEPS = 3
"""Minimum number of steps of which an average is taken."""
MAX_RANKS = 20_000
"""Maximum number of ranks whose steps are averaged. Further ones are left out."""
MAX_STORED_RANKS = 64
"""Maximum number of ranks whose step times are stored: those that come last to exchanges, or wait
longest for data if exchanges are not measured.
"""


class _StepCounts(NamedTuple):
    """What is kept of a report: the steps, the time of the last one, and the parts."""

    steps: int
    last: float
    data: float | None
    exchange: float | None
    snapshot: float | None

    @property
    def measured(self) -> bool:
        """Whether a part has begun."""
        return any(part is not None for part in self[2:])


@dataclass(slots=True)
class _RankSteps:
    """The counts of one rank."""

    node: str
    """Its node."""
    pid: int
    """Its process."""
    newest: _StepCounts
    """Its newest counts."""
    marks: list[_StepCounts]
    """Earlier counts, the oldest first."""

    def add(self, counts: _StepCounts) -> None:
        """Add newer counts."""
        if self.newest.last - self.marks[-1].last >= MARK_S:
            # Until a part has begun one mark is enough.
            earlier = self.marks[1 - MARKS :] if self.newest.measured else []
            self.marks = [*earlier, self.newest]
        self.newest = counts

    def since(self, rank: int, mark: _StepCounts) -> RankTimes | None:
        """Return the mean step since ``mark``; None if there were too few steps."""
        steps = self.newest.steps - mark.steps
        if steps < MIN_STEPS:
            return None
        return RankTimes(
            rank,
            self.node,
            (self.newest.last - mark.last) / steps,
            *(
                # A part that began after the mark was at 0 then.
                None if now is None else max(0.0, now - (before or 0.0)) / steps
                for now, before in zip(self.newest[2:], mark[2:], strict=True)
            ),
        )


class StepWindows:
    """The steps of the newest round of one job."""

    def __init__(self) -> None:
        self._generation = 0
        self._ranks: dict[int, _RankSteps] = {}
        self._measured = False
        """Whether a rank has measured a part of its steps."""
        self._began = 0.0
        """Time of the round's first counts, seconds."""
        self._newest = 0.0
        """Time of the newest step, seconds."""
        self._recent: tuple[float, StepBreakdown | None] = (float("-inf"), None)
        """Time of a step, and the breakdown at that time."""
        self._means_of_all: tuple[float, tuple[RankTimes, ...]] = (float("-inf"), ())
        """Time of a step, and the mean step of every rank at that time."""

    def add(self, node: str, record: Progress) -> None:
        """Add the counts of one worker. Late and repeated ones are ignored.

        Args:
            node: node of the worker.
            record: its cumulative counts.
        """
        if record.generation < self._generation:
            return
        if record.generation > self._generation:
            self._generation = record.generation
            self._ranks.clear()
            self._began = record.last
            self._measured, self._recent = False, (float("-inf"), None)
            self._means_of_all = (float("-inf"), ())
        counts = _StepCounts(
            record.steps, record.last, record.data, record.exchange, record.snapshot
        )
        self._measured = self._measured or counts.measured
        self._newest = max(self._newest, record.last)
        rank = self._ranks.get(record.rank)
        if rank is None or rank.pid != record.pid:
            if rank is not None or len(self._ranks) < MAX_RANKS:
                self._ranks[record.rank] = _RankSteps(node, record.pid, counts, [counts])
                self._means_of_all = (float("-inf"), ())
        elif record.steps > rank.newest.steps and record.last > rank.newest.last:
            rank.add(counts)

    def ranks(self, generation: int) -> tuple[RankTimes, ...]:
        """Return the mean step of each rank over the last ``MARKS`` intervals, the first rank
        first; empty if the workers of this round measure nothing. Once there is one of every rank,
        they are computed anew when newer steps have been reported (``REFRESH_S``). ``generation``:
        the round.
        """
        if generation != self._generation or not self._measured:
            return ()
        at, means = self._means_of_all
        if self._is_stale(at):
            means = self._means(0)
            if len(means) == len(self._ranks):
                self._means_of_all = self._newest, means
        return means

    def recent(self, generation: int) -> StepBreakdown | None:
        """Return where the time of the steps went lately; None if that is not measured. It is
        computed anew when newer steps have been reported (``REFRESH_S``).
        """
        if generation != self._generation or not self._measured:
            return None
        if self._is_stale(self._recent[0]):
            self._recent = self._newest, breakdown(self._means(-2))
        return self._recent[1]

    def _is_stale(self, at: float) -> bool:
        """Return whether an average is computed anew. ``at``: time of the newest step in it."""
        duration = REFRESH_SHARE * (self._newest - self._began)
        return self._newest - at >= min(REFRESH_S, duration)

    def _means(self, index: int) -> tuple[RankTimes, ...]:
        means = []
        for number, rank in sorted(self._ranks.items()):
            mark = rank.marks[max(index, -len(rank.marks))]
            if rank.newest.measured:
                mean = rank.since(number, mark)
                if mean is not None:
                    means.append(mean)
        return tuple(means)


def step_times_record(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """Return where the time of a job's steps goes, for its observation; empty if not measured.

    Args:
        ranks: the mean step of each rank.
    """
    whole = breakdown(ranks)
    if whole is None:
        return {}
    last_first = sorted(ranks, key=lambda rank: (rank.exchange_s or 0.0, -(rank.data_s or 0.0)))
    return {
        "step_s": whole.step_s,
        "shares": dict(whole.shares),
        "cause": whole.cause.value,
        "advice": whole.advice(),
        "rank_count": len(ranks),
        "ranks": [
            [rank.rank, rank.node, rank.step_s, rank.data_s, rank.exchange_s, rank.snapshot_s]
            for rank in sorted(last_first[:MAX_STORED_RANKS], key=lambda rank: rank.rank)
        ],
    }


MAX_JOBS = 1000
"""Number of jobs whose reads are kept, ended ones included."""
MAX_NAMES = 16
"""Number of data sets of one job that are counted."""
MAX_PROCESSES = 4096
"""Number of processes of one job that are told apart. The counts of those that have been silent for
longest are added up.
"""
_SHOWN_READS = ("node_hits", "peer_hits", "source_reads", "hit_bytes", "source_bytes", "unpacked")
_READ_COUNTS = (*_SHOWN_READS, "source_us")
_FACTS = ("samples", "data_bytes", "node_bytes")


@dataclass
class _DataSet:
    """The reads of one data set by one job."""

    processes: OrderedDict[tuple[int, str], tuple[int, ...]] = field(default_factory=OrderedDict)
    """Rank and process → its newest counts, the process that reported last at the end."""
    ended: tuple[int, ...] = (0,) * len(_READ_COUNTS)
    """Sum of the counts of processes that are no longer told apart."""
    stores: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Node → (samples in its memory, bytes of memory for them)."""
    facts: dict[str, int] = field(default_factory=dict)
    """Newest facts about the data set."""
    coverage: float | None = None
    """Part of the data that an epoch reads; None if unknown."""

    def add(self, rank: int, data: Mapping[str, Any]) -> None:
        """Add the counts of one process."""
        key = (rank, str(data.get("process", "")))
        self.processes[key] = tuple(_count(data.get(name)) for name in _READ_COUNTS)
        self.processes.move_to_end(key)
        while len(self.processes) > MAX_PROCESSES:
            _, oldest = self.processes.popitem(last=False)
            self.ended = tuple(a + b for a, b in zip(self.ended, oldest, strict=True))
        self.facts = {name: _count(data.get(name)) for name in _FACTS}
        node = str(data.get("node", ""))
        self.stores[node] = (_count(data.get("present")), _count(data.get("memory_bytes")))
        coverage = data.get("coverage")
        self.coverage = coverage if isinstance(coverage, float) and 0 <= coverage <= 1 else None

    def _sums(self) -> dict[str, int]:
        """Return each count, summed over the processes."""
        sums = self.ended
        for counts in self.processes.values():
            sums = tuple(a + b for a, b in zip(sums, counts, strict=True))
        return dict(zip(_READ_COUNTS, sums, strict=True))

    def reread_s(self, nodes: Collection[str], processes: int) -> dict[str, float]:
        """Return the time in which the data of each of ``nodes`` would be read again without it,
        seconds. ``processes``: ranks on a node, which read side by side.
        """
        sums = self._sums()
        if not sums["source_reads"]:
            return {}
        sample_s = sums["source_us"] * 1e-6 / sums["source_reads"] / max(1, processes)
        present = {node: self.stores.get(node, (0, 0))[0] for node in nodes}
        return reread_s(present, sample_s)

    def view(self, name: str, nodes: Collection[str]) -> DataCacheView:
        """Return the reads so far, and what the memory of ``nodes`` has."""
        sums = self._sums()
        stores = [store for node, store in self.stores.items() if node in nodes]
        return DataCacheView(
            name,
            **{count: sums[count] for count in _SHOWN_READS},
            **self.facts,
            present=sum(present for present, _ in stores),
            memory_bytes=sum(memory for _, memory in stores),
            coverage=self.coverage,
        )


class DataReads:
    """The reads of all jobs."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, dict[str, _DataSet]] = OrderedDict()

    def add(self, job: str, rank: int, data: Mapping[str, Any]) -> None:
        """Add the counts that one process reports.

        Args:
            job: id of its job.
            rank: its rank.
            data: the fields of DataCacheFacts.
        """
        name = str(data.get("name", ""))
        sets = self._jobs.setdefault(job, {})
        self._jobs.move_to_end(job)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        if name and (name in sets or len(sets) < MAX_NAMES):
            sets.setdefault(name, _DataSet()).add(rank, data)

    def views(self, job: str, nodes: Collection[str]) -> tuple[DataCacheView, ...]:
        """Return the reads of one job, by data set. ``nodes``: the nodes that it has now."""
        sets = self._jobs.get(job, {})
        return tuple(sets[name].view(name, nodes) for name in sorted(sets))

    def reread_s(self, job: str, nodes: Collection[str], processes: int) -> dict[str, float]:
        """Return the time in which a job would read its training data again without each of its
        nodes, seconds; nodes without data are absent.

        Args:
            job: id of the job.
            nodes: the nodes that it has now.
            processes: number of its ranks on each.
        """
        total_s: dict[str, float] = {}
        for data in self._jobs.get(job, {}).values():
            for node, seconds in data.reread_s(nodes, processes).items():
                if seconds:
                    total_s[node] = total_s.get(node, 0.0) + seconds
        return total_s


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
