"""The pause between two polls of a main scheduler. Pure.

A scheduler that answers slowly is polled less often, up to the limit that the guarantees to the
site set (:attr:`~scavenger.batch.settings.BatchSettings.max_pause_s`).
:mod:`scavenger.batch.calls` handles a scheduler that does not answer.
"""

from __future__ import annotations

from scavenger.batch.calls import MIN_BACKOFF_S


class PollPause:
    """The pause between polls of one main scheduler.

    Args:
        longest_s: maximum pause after slow answers, seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._slow = 0
        """Number of successive slow answers."""

    def after(self, took_s: float, usual_s: float, pause_ratio: float) -> float:
        """Return the seconds until the next poll.

        The first slow answer costs MIN_BACKOFF_S, each further one twice as much, because a single
        slow answer does not predict the next.

        Args:
            took_s: duration of the last poll, seconds.
            usual_s: pause after a quick answer, seconds; also the minimum.
            pause_ratio: ratio of the pause to ``took_s`` if answers stay slow.
        """
        if pause_ratio * took_s <= usual_s:
            self._slow = 0
            return usual_s
        doubled_s = MIN_BACKOFF_S * 2.0 ** min(self._slow, 60)
        self._slow += 1
        return max(usual_s, min(pause_ratio * took_s, doubled_s, self._longest_s))
