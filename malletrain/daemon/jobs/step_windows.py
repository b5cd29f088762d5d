"""The times of a job's steps over the last minutes, from the cumulative counts that its workers
report. Pure: times come with the counts.

Decides over which time the steps are averaged, and the averages of which ranks are stored.
:mod:`malletrain.core.step_times` says what the averages mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from malletrain.core.step_times import RankTimes, StepBreakdown, breakdown
from malletrain.protocol.messages import Progress

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


class _Counts(NamedTuple):
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
class _Rank:
    """The counts of one rank."""

    node: str
    """Its node."""
    pid: int
    """Its process."""
    newest: _Counts
    """Its newest counts."""
    marks: list[_Counts]
    """Earlier counts, the oldest first."""

    def add(self, counts: _Counts) -> None:
        """Add newer counts."""
        if self.newest.last - self.marks[-1].last >= MARK_S:
            # Until a part has begun one mark is enough.
            earlier = self.marks[1 - MARKS :] if self.newest.measured else []
            self.marks = [*earlier, self.newest]
        self.newest = counts

    def since(self, rank: int, mark: _Counts) -> RankTimes | None:
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
        self._ranks: dict[int, _Rank] = {}
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
        counts = _Counts(record.steps, record.last, record.data, record.exchange, record.snapshot)
        self._measured = self._measured or counts.measured
        self._newest = max(self._newest, record.last)
        rank = self._ranks.get(record.rank)
        if rank is None or rank.pid != record.pid:
            if rank is not None or len(self._ranks) < MAX_RANKS:
                self._ranks[record.rank] = _Rank(node, record.pid, counts, [counts])
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
