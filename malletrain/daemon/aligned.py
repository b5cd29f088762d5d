"""Adds up the sample counts of a job's ranks at one common moment. Pure.

Ranks report at different moments, so the sum of their newest counts jumps by what some ranks have
not reported yet. Here each rank's count is interpolated linearly between two of its reports, at the
newest moment up to which every rank has reported. Within a round the sum never falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import islice

from malletrain.protocol import messages

KEPT = 64
"""Reports remembered of each rank."""
_SILENT_S = 2.0
_FIRST_PATIENCE_S = 120.0


class AlignedCounts:
    """Counts of the newest round seen."""

    def __init__(self) -> None:
        self.generation = 0
        self.time = 0.0
        self.samples = 0.0
        self._tracks: dict[tuple[int, int], deque[tuple[float, float]]] = {}

    def feed(self, record: messages.Progress) -> None:
        """Take one rank's report; late and repeated ones are left out."""
        if record.generation > self.generation:
            self.generation, self.time, self.samples = record.generation, 0.0, 0.0
            self._tracks.clear()
        if record.generation == self.generation:
            track = self._tracks.setdefault((record.rank, record.pid), deque(maxlen=KEPT))
            if not track or (record.last > track[-1][0] and record.samples >= track[-1][1]):
                track.append((record.last, record.samples))

    def advance(self) -> bool:
        """Read the counts anew; whether the common moment moved on. ``time`` and ``samples`` (since
        the round began) tell where to.
        """
        tracks = self._tracks.values()
        newest = max((t[-1][0] for t in tracks), default=0.0)
        moment = min((t[-1][0] for t in tracks if newest - t[-1][0] <= _patience(t)), default=0.0)
        if moment <= self.time:
            return False
        if self.time:
            self.samples += sum(_at(t, moment) - _at(t, self.time) for t in tracks)
        self.time = moment
        return True


def _patience(track: deque[tuple[float, float]]) -> float:
    """Seconds for which a rank may say nothing before the others are counted without it."""
    if len(track) < 2:
        return _FIRST_PATIENCE_S
    return max(_SILENT_S, 4 * (track[-1][0] - track[-2][0]))


def _at(track: deque[tuple[float, float]], moment: float) -> float:
    """The rank's count at ``moment``; before its first and after its last report, theirs."""
    after = bisect_right(track, moment, key=lambda report: report[0])
    if after == 0:
        return track[0][1]
    if after == len(track):
        return track[-1][1]
    (t0, s0), (t1, s1) = islice(track, after - 1, after + 1)
    return s0 + (s1 - s0) * (moment - t0) / (t1 - t0)
