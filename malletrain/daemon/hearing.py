"""Whether silence is the agents' trouble or the daemon's own. Pure: times are told.

A daemon that stood still (stopped, swapped out, its machine suspended) hears nobody for that time,
and one whose link is down hears nobody at all; their agents train on undisturbed. Decides when that
is so. What follows from it (nobody is lost, no time limit runs, nothing is planned) is done by
:class:`malletrain.daemon.core.Core`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum

LATE_S = 2.0
"""A look that comes later than this after the one before comes late: the daemon stood still."""
PATIENCE = 3.0
"""Times the agents' time-out that most of them may be silent while some are heard. Then they are
lost: it was not the daemon's own connection, but a part of the machine that failed."""


class Ear(Enum):
    """What the silence of agents means."""

    WELL = "who is silent is lost"
    DEAF = "the daemon hears nobody, or hardly anybody"
    BACK = "it has just begun to hear them again"


class Hearing:
    """Of one daemon.

    Args:
        timeout_s: an agent alone that is silent for so long is lost.
        heartbeat_s: how often each says something.
    """

    def __init__(self, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s, self._heartbeat_s = timeout_s, heartbeat_s
        self._quiet_s = max(timeout_s / 2, 1.5 * heartbeat_s)
        self._looked: float | None = None
        self.deaf_since: float | None = None
        """Since when the daemon is taken to hear nobody; None: it hears."""
        self._some_since: float | None = None
        """Since when, of that time, some are heard without a break."""
        self.settling_until: float | None = None
        """Agents come back after the daemon could not hear them; until when it waits for them at
        most. None: it does not.
        """
        self._back_since = math.inf

    def settle(self, until: float, back_since: float = math.inf) -> None:
        """Wait for the agents until then at most; ``back_since``: since when they can be heard."""
        self.settling_until, self._back_since = until, back_since

    def settled(self, last_heard: Collection[float], now: float) -> bool:
        """Whether that wait is over: its time is, or all agents have been heard since. What was
        said before, and read only now, does not count: by now its sender may have hung up.
        """
        until, after = self.settling_until, self._back_since + self._heartbeat_s
        if until is None or (now < until and not all(after <= at <= now for at in last_heard)):
            return False
        self.settling_until = None
        return True

    def unheard_s(self, now: float) -> float:
        """Seconds since the last look in which the daemon can have heard nothing; 0 in general. To
        be called at every turn, and every second at least.
        """
        since = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        return since if since > LATE_S or self.deaf_since is not None else 0.0

    def listen(self, last_heard: Collection[float], now: float) -> Ear:
        """What the silence of agents means now.

        Args:
            last_heard: when each of the agents was heard last, seconds.
            now: the time, seconds.
        """
        # Those that fall silent together do so within a heartbeat, not in one instant.
        quiet = sum(now - heard > self._quiet_s for heard in last_heard)
        most = quiet >= 2 and 2 * quiet > len(last_heard)
        if self.deaf_since is None:
            if not most or all(now - heard <= self._timeout_s for heard in last_heard):
                return Ear.WELL
            self.deaf_since = now
        if quiet == len(last_heard):
            self._some_since = None
        elif self._some_since is None:
            self._some_since = now
        in_vain = (
            self._some_since is not None and now - self._some_since > PATIENCE * self._timeout_s
        )
        if most and not in_vain:
            return Ear.DEAF
        self.deaf_since = self._some_since = None
        return Ear.WELL if most else Ear.BACK
