"""How much of the daemon's time one user may have: requests wait for their turn.

Decides when a request is answered, and when there are too many that wait. A client that waits for
each answer, as ours do, is slowed down and never refused. The user who runs the daemon and its
operators do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

MOST_WAITING = 200
"""Requests of one user that wait for their turn; more are refused."""
BURST_S = 5.0
"""Turns of so many seconds are saved up while a user asks for nothing."""
MOST_USERS = 10_000


@dataclass
class _Account:
    """One user's turns."""

    turns: float
    at: float
    """When they were counted last."""


class Rates:
    """The turns of all users. ``rate``: requests a second of one user; ``free``: who does not wait;
    ``now``: the time, seconds.
    """

    def __init__(self, rate: float, free: Callable[[str], bool], now: Callable[[], float]) -> None:
        self._rate, self._free, self._now = rate, free, now
        self._accounts: dict[str, _Account] = {}

    def wait_s(self, user: str) -> float | None:
        """How long the next request of ``user`` waits, seconds; None: too many wait already."""
        if self._free(user):
            return 0.0
        account = self._account(user)
        if account.turns <= 1.0 - MOST_WAITING:
            return None
        account.turns -= 1.0
        return max(0.0, -account.turns / self._rate)

    def at_once(self, user: str) -> bool:
        """Whether it is the turn of ``user`` now; if not, nothing is taken from later ones."""
        if self._free(user):
            return True
        account = self._account(user)
        if account.turns < 1.0:
            return False
        account.turns -= 1.0
        return True

    def _account(self, user: str) -> _Account:
        now, most = self._now(), max(1.0, self._rate * BURST_S)
        account = self._accounts.pop(user, None) or _Account(most, now)
        self._accounts[user] = account
        if len(self._accounts) > MOST_USERS:
            self._accounts.pop(next(iter(self._accounts)))
        account.turns = min(most, account.turns + max(0.0, now - account.at) * self._rate)
        account.at = now
        return account

    async def turn(self, user: str) -> bool:
        """Wait for the turn of ``user``; False: there is none, too many wait already."""
        wait = self.wait_s(user)
        if wait:
            await asyncio.sleep(wait)
        return wait is not None
