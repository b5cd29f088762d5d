"""How long a main scheduler is left alone between two polls. Pure.

A scheduler that answers slowly is asked more rarely, up to the limit that the promises to the site
set (:attr:`~scavenger.batch.settings.BatchSettings.longest_pause_s`). One that gives no answer is
:mod:`scavenger.batch.calls`'s business.
"""

from __future__ import annotations

from scavenger.batch.calls import FIRST_S


class PollPause:
    """Of one main scheduler.

    Args:
        longest_s: no slow answer makes the pause longer than this, seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._slow = 0
        """Slow answers in a row."""

    def after(self, took_s: float, usual_s: float, share: float) -> float:
        """Seconds until the next poll.

        The first slow answer costs FIRST_S, each further one twice as much: one that is late once
        says nothing about the next.

        Args:
            took_s: how long the last poll took.
            usual_s: the pause after a quick answer, and the shortest one.
            share: the pause is so many times ``took_s`` where answers stay slow.
        """
        if share * took_s <= usual_s:
            self._slow = 0
            return usual_s
        doubled_s = FIRST_S * 2.0 ** min(self._slow, 60)
        self._slow += 1
        return max(usual_s, min(share * took_s, doubled_s, self._longest_s))
