"""The times of a job's steps over the last minutes, from the cumulative counts that its workers
report. Pure: times come with the counts.

Decides over which time the steps are averaged. :mod:`malletrain.core.step_times` says what the
averages mean.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from malletrain.core.step_times import RankTimes, StepBreakdown, breakdown
from malletrain.protocol.messages import Progress

MARK_S = 10.0
"""Minimum time between two counts that are kept, seconds. The newest breakdown is that of the last
one to two such intervals.
"""
MARKS = 30
"""Number of counts that are kept of each rank."""
REFRESH_S = 2.0
"""Minimum time between two computations of the newest breakdown, seconds."""
MIN_STEPS = 3
"""Minimum number of steps of which an average is taken."""
MAX_RANKS = 20_000
"""Maximum number of ranks whose steps are averaged. Further ones are left out."""


@dataclass
class _Rank:
    """The counts of one rank."""

    node: str
    """Its node."""
    newest: Progress
    """Its newest counts."""
    marks: deque[Progress] = field(default_factory=lambda: deque(maxlen=MARKS))
    """Earlier counts, the oldest first."""

    def since(self, rank: int, mark: Progress) -> RankTimes | None:
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
                for now, before in zip(_parts(self.newest), _parts(mark), strict=True)
            ),
        )


def _parts(record: Progress) -> tuple[float | None, float | None, float | None]:
    return record.data, record.exchange, record.snapshot


class StepWindows:
    """The steps of the newest round of one job."""

    def __init__(self) -> None:
        self._generation = 0
        self._ranks: dict[int, _Rank] = {}
        self._measured = False
        """Whether a rank has measured a part of its steps."""
        self._newest = 0.0
        """Time of the newest step, seconds."""
        self._recent: tuple[float, StepBreakdown | None] = (float("-inf"), None)
        """Time of a step, and the breakdown at that time."""

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
            self._measured, self._recent = False, (float("-inf"), None)
        self._measured = self._measured or any(part is not None for part in _parts(record))
        self._newest = max(self._newest, record.last)
        rank = self._ranks.get(record.rank)
        if rank is None or rank.newest.pid != record.pid:
            if rank is not None or len(self._ranks) < MAX_RANKS:
                self._ranks[record.rank] = rank = _Rank(node, record)
                rank.marks.append(record)
            return
        if record.steps <= rank.newest.steps or record.last <= rank.newest.last:
            return
        if rank.newest.last - rank.marks[-1].last >= MARK_S:
            rank.marks.append(rank.newest)
        rank.newest = record

    def ranks(self, generation: int) -> tuple[RankTimes, ...]:
        """Return the mean step of each rank over the last ``MARKS`` intervals, the first rank
        first; empty if the workers of this round measure nothing. ``generation``: the round.
        """
        return self._means(generation, 0)

    def recent(self, generation: int) -> StepBreakdown | None:
        """Return where the time of the steps went lately; None if that is not measured. It is
        computed anew when steps of ``REFRESH_S`` have been reported.
        """
        if generation != self._generation or not self._measured:
            return None
        if self._newest - self._recent[0] >= REFRESH_S:
            self._recent = self._newest, breakdown(self._means(generation, -2))
        return self._recent[1]

    def _means(self, generation: int, index: int) -> tuple[RankTimes, ...]:
        if generation != self._generation or not self._measured:
            return ()
        means = []
        for number, rank in sorted(self._ranks.items()):
            mark = rank.marks[max(index, -len(rank.marks))]
            if any(part is not None for part in _parts(rank.newest)):
                mean = rank.since(number, mark)
                if mean is not None:
                    means.append(mean)
        return tuple(means)
