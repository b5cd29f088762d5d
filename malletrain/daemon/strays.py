"""Finds leases that the main scheduler has and the daemon has not stored as active. Pure.

A lease is stored before it is submitted, so one that is not stored as running has ended for the
daemon: its submission failed although the main scheduler accepted it, or a poll missed it. Its
agent cannot report, and would hold its node until the time limit. The scavenger records released
leases only until the daemon restarts. Decides which leases to end now;
:mod:`malletrain.daemon.lease_reconciler` ends them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from scavenger.interface import Lease, LeaseState

RETRY_INTERVAL_S = 30.0
"""Time after which the request to end a lease is repeated, seconds. Its end takes the grace
time.
"""


class Strays:
    """The strays of one daemon."""

    def __init__(self) -> None:
        self._requested_at: dict[str, float] = {}
        """Lease → time of the last request to end it."""

    def to_end(self, leases: Iterable[Lease], active: Container[str], now: float) -> list[Lease]:
        """Return the leases to end now.

        Args:
            leases: the leases in the answer of a poll.
            active: ids of the leases that have not ended for the daemon.
            now: time, seconds.
        """
        strays = {
            lease.id: lease
            for lease in leases
            if lease.state is not LeaseState.ENDED and lease.id not in active
        }
        self._requested_at = {
            lease: at for lease, at in self._requested_at.items() if lease in strays
        }
        due = [
            lease
            for lease in strays.values()
            if now - self._requested_at.get(lease.id, -RETRY_INTERVAL_S) >= RETRY_INTERVAL_S
        ]
        self._requested_at.update((lease.id, now) for lease in due)
        return due
