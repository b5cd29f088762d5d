"""A series of numbers over time in bounded memory: the whole story, coarser the longer it is.

Pure.
"""

from __future__ import annotations

MOST_POINTS = 600


class ThinnedSeries:
    """Points (time, values) of which at most ``most`` are kept, spread over all of the time.

    When there are too many, every other one goes and from then on points closer together than twice
    the distance before are not taken up. The newest is always there.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        if most < 4:
            raise ValueError(f"A series of {most} points shows nothing; keep 4 at least.")
        self._most = most
        self._points: list[tuple[float, ...]] = []
        self._newest: tuple[float, ...] | None = None
        self._step_s = 0.0

    def add(self, time: float, *values: float) -> None:
        """One more point. A time before that of the newest is left out."""
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
        """The points that are kept, the oldest first."""
        if self._newest is not None and self._points and self._newest != self._points[-1]:
            return [*self._points, self._newest]
        return list(self._points)
