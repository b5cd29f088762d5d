"""Limits how much of the daemon's time one user gets; further requests wait.

Decides when a request is answered, and when too many wait, by requests a second and by processor
time. A client that waits for each answer, as ``malletrain`` does, is slowed down and never refused.
The user who runs the daemon and its operators do not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_WAITING = 200
"""Requests of one user that wait for their turn; more are refused."""
MOST_WAIT_S = 30.0
"""Who would wait longer for what the requests before took of the processor is refused: else a flood
of them would be answered for hours after its end.
"""
MOST_WAITING_BYTES = 1024 * 1024
"""Of these requests together, beside one."""
BURST_S = 5.0
"""Turns of so many seconds are saved up while a user asks for nothing."""
MOST_PART = 0.1
"""Of a processor that the answers to one user may take in the long run, if none of them takes very
long.
"""
MOST_SURPRISE_S = 2.0
"""One answer, however long it took, has the next ones wait so much longer at most. Who asks again
and again for what takes more than this part of the processor's time has more than its part.
"""
MOST_OWED_S = MOST_PART * (BURST_S + 2.0 * MOST_WAIT_S)
"""What answers took of the processor beyond that is forgotten: who made a flood of dear requests is
refused for half a minute after it, and not for hours.
"""
MOST_USUAL_S = 0.05
"""No request is taken, before its answer, for one that needs more of the processor."""
MOST_USERS = 10_000


@dataclass
class _Account:
    """One user's turns."""

    turns: float
    at: float
    """When they were counted last."""
    spent_s: float = 0.0
    """Of the processor, less what it may have since."""
    waiting_bytes: int = 0
    """Of the requests that are not answered yet."""
    usual_s: float = 0.005
    """What an answer usually takes of it: how many that wait will take is not known before."""


@dataclass(frozen=True)
class Turn:
    """Of one request."""

    wait_s: float
    taken_s: float
    """Of the processor, before the answer, for it; see :meth:`Rates.took`."""
    size: int
    """Bytes of the request."""


class Rates:
    """The turns of all users. ``rate``: requests a second of one user; ``free``: who does not wait;
    ``now``: the time, seconds.
    """

    def __init__(self, rate: float, free: Callable[[str], bool], now: Callable[[], float]) -> None:
        self._rate, self._free, self._now = rate, free, now
        self._accounts: dict[str, _Account] = {}

    def next(self, user: str, size: int = 0) -> Turn | None:
        """The turn of the next request of ``user``, of so many bytes; None: too many wait
        already.
        """
        if self._free(user):
            return Turn(0.0, 0.0, size)
        account = self._account(user)
        spent_s = account.spent_s + account.usual_s
        over_s = spent_s / MOST_PART - BURST_S
        if account.turns <= 1.0 - MOST_WAITING or over_s > MOST_WAIT_S:
            return None
        if account.waiting_bytes and account.waiting_bytes + size > MOST_WAITING_BYTES:
            return None
        account.turns -= 1.0
        account.spent_s = spent_s
        account.waiting_bytes += size
        wait_s = max(0.0, -account.turns / self._rate, over_s)
        return Turn(wait_s, account.usual_s, size)

    def took(self, user: str, turn: Turn, seconds: float) -> None:
        """The answer to a request that had its ``turn`` took so much of the processor."""
        account = self._account(user)
        account.waiting_bytes = max(0, account.waiting_bytes - turn.size)
        if self._free(user):
            return
        more = account.spent_s + seconds - turn.taken_s
        most = MOST_PART * MOST_SURPRISE_S + max(account.spent_s, MOST_PART * BURST_S)
        account.spent_s = max(0.0, min(more, most, MOST_OWED_S))
        usual = account.usual_s + (seconds - account.usual_s) / 5.0
        account.usual_s = min(usual, MOST_USUAL_S)

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
        since = max(0.0, now - account.at)
        account.turns = min(most, account.turns + since * self._rate)
        account.spent_s = max(0.0, account.spent_s - since * MOST_PART)
        account.at = now
        return account
