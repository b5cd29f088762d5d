"""Handles requests with a wrong token: how long each waits for its answer, and which are logged.
Pure.

Decides by address. A request with the right token is never delayed, even if others from its address
had a wrong one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
"""First and maximum delay of an answer, seconds. It doubles with each failure."""
FORGOTTEN_AFTER_S = 600.0
"""Time after which the failures of an address are forgotten, seconds."""
MAX_ADDRESSES = 1000
"""Maximum number of addresses that are recorded."""
LOG_EVERY_S = 10.0
"""Minimum interval between log lines about one address, seconds. Each has the number of
failures.
"""


@dataclass
class _Record:
    failures: int = 0
    """Number of failures."""
    at: float = 0.0
    """Time of the last failure, seconds."""
    logged_at: float = float("-inf")
    """Time of the last log line, seconds."""


@dataclass(frozen=True)
class FailedLogin:
    """One failure. ``pause_s``: delay of its answer, seconds. ``line``: line for the log; empty if
    there is none.
    """

    pause_s: float
    line: str


class FailedLogins:
    """The failures of one page. Times are on a monotonic clock."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, _Record] = OrderedDict()

    def add(self, address: str, now: float) -> FailedLogin:
        """Record a request with a wrong token from ``address``."""
        record = self._by_address.pop(address, _Record())
        if now - record.at > FORGOTTEN_AFTER_S:
            record = _Record()
        self._by_address[address] = record
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        record.failures, record.at = record.failures + 1, now
        line = ""
        if now - record.logged_at >= LOG_EVERY_S:
            record.logged_at = now
            line = f"A login with a wrong token was refused. It came from {address}"
            line += f", {record.failures} so far." if record.failures > 1 else "."
        pause_s = FIRST_PAUSE_S * 2.0 ** min(record.failures - 1, 10)
        return FailedLogin(min(MAX_PAUSE_S, pause_s), line)
