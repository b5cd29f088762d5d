"""Stores a series of numbers over time in bounded memory. The longer the series, the coarser it is.

Pure.
"""

from __future__ import annotations

MAX_POINTS = 600
"""Default maximum number of points."""


class ThinnedSeries:
    """Points (time, values), at most ``most`` of them, spread over the whole time.

    When there are too many, every second one is removed, and the minimum distance of further points
    is doubled. The newest point is always kept.
    """

    def __init__(self, most: int = MAX_POINTS) -> None:
        if most < 4:
            raise ValueError(f"A series of {most} points shows nothing; keep 4 at least.")
        self._most = most
        self._points: list[tuple[float, ...]] = []
        self._newest: tuple[float, ...] | None = None
        self._step_s = 0.0

    def add(self, time: float, *values: float) -> None:
        """Add a point. A point before the newest one is ignored."""
        if self._newest is not None and time < self._newest[0]:
            return
        self._newest = (time, *values)
        if self._points and time - self._points[-1][0] < self._step_s:
            return
        self._points.append(self._newest)
        if len(self._points) > self._most:
            length = self._points[-1][0] - self._points[0][0]
            self._points = self._points[::2]
            self._step_s = max(2 * self._step_s, 2 * length / self._most)

    def points(self) -> list[tuple[float, ...]]:
        """Return the points, the oldest first."""
        if self._newest is not None and self._points and self._newest != self._points[-1]:
            return [*self._points, self._newest]
        return list(self._points)
