"""Requests with a wrong token: how long each waits for its answer, and which are logged. Pure.

Decides by address. A request with the right token is never slowed, whoever failed from there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
FORGOTTEN_AFTER_S = 600.0
MOST_ADDRESSES = 1000
LOG_EVERY_S = 10.0
"""The failures of one address are logged no more often than this, with their number."""


@dataclass
class _Record:
    failures: int = 0
    at: float = 0.0
    logged_at: float = float("-inf")


@dataclass(frozen=True)
class FailedLogin:
    """One failure: seconds until it is answered, and the line for the log; empty: none."""

    pause_s: float
    line: str


class FailedLogins:
    """Of one page. Times on any clock that does not go back."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, _Record] = OrderedDict()

    def add(self, address: str, now: float) -> FailedLogin:
        """Another request from ``address`` has a wrong token."""
        record = self._by_address.pop(address, _Record())
        if now - record.at > FORGOTTEN_AFTER_S:
            record = _Record()
        self._by_address[address] = record
        if len(self._by_address) > MOST_ADDRESSES:
            self._by_address.popitem(last=False)
        record.failures, record.at = record.failures + 1, now
        line = ""
        if now - record.logged_at >= LOG_EVERY_S:
            record.logged_at = now
            line = f"A login with a wrong token was refused. It came from {address}"
            line += f", {record.failures} so far." if record.failures > 1 else "."
        pause_s = FIRST_PAUSE_S * 2.0 ** min(record.failures - 1, 10)
        return FailedLogin(min(LONGEST_PAUSE_S, pause_s), line)
