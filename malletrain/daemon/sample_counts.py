"""Adds up the sample counts of a job's ranks at one common moment. Pure.

Ranks report at different times, so the sum of their newest counts would jump whenever a late rank
reports. Here each rank's count is interpolated linearly between two of its reports, at the newest
moment up to which every rank has reported. Within a round the sum never falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import islice

from malletrain.protocol import messages

REPORTS_PER_RANK = 64
"""Number of reports that are kept of each rank."""
_MIN_REPORT_TIMEOUT_S = 2.0
"""Minimum time without a report after which the sum no longer waits for a rank, seconds."""
_INITIAL_REPORT_TIMEOUT_S = 120.0
"""The same time for a rank with fewer than two reports, seconds."""


class SampleCount:
    """Samples of the newest round, summed over its ranks."""

    def __init__(self) -> None:
        self.generation = 0
        self.time = 0.0
        self.samples = 0.0
        self._reports_by_rank: dict[tuple[int, int], deque[tuple[float, float]]] = {}

    def add_report(self, record: messages.Progress) -> None:
        """Add one rank's report. Late and repeated reports are ignored."""
        if record.generation > self.generation:
            self.generation, self.time, self.samples = record.generation, 0.0, 0.0
            self._reports_by_rank.clear()
        if record.generation == self.generation:
            reports = self._reports_by_rank.setdefault(
                (record.rank, record.pid), deque(maxlen=REPORTS_PER_RANK)
            )
            if not reports or (record.last > reports[-1][0] and record.samples >= reports[-1][1]):
                reports.append((record.last, record.samples))

    def advance(self) -> bool:
        """Move ``time`` to the newest common common_time and ``samples`` to the sum at that moment,
        since the round began. Returns whether ``time`` changed.
        """
        all_reports = self._reports_by_rank.values()
        newest = max((t[-1][0] for t in all_reports), default=0.0)
        common_time = min(
            (t[-1][0] for t in all_reports if newest - t[-1][0] <= _report_timeout_s(t)),
            default=0.0,
        )
        if common_time <= self.time:
            return False
        if self.time:
            self.samples += sum(
                _count_at(t, common_time) - _count_at(t, self.time) for t in all_reports
            )
        self.time = common_time
        return True


def _report_timeout_s(reports: deque[tuple[float, float]]) -> float:
    """Return the seconds without a report after which the sum no longer waits for a rank."""
    if len(reports) < 2:
        return _INITIAL_REPORT_TIMEOUT_S
    return max(_MIN_REPORT_TIMEOUT_S, 4 * (reports[-1][0] - reports[-2][0]))


def _count_at(reports: deque[tuple[float, float]], moment: float) -> float:
    """Return the rank's count at ``moment``. Before its first report and after its last, return the
    count of that report.
    """
    after = bisect_right(reports, moment, key=lambda report: report[0])
    if after == 0:
        return reports[0][1]
    if after == len(reports):
        return reports[-1][1]
    (t0, s0), (t1, s1) = islice(reports, after - 1, after + 1)
    return s0 + (s1 - s0) * (moment - t0) / (t1 - t0)
