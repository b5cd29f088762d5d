"""Leases that the main scheduler has and the daemon does not want. Pure.

A lease is stored before it is submitted, so one that is not stored as running has ended for the
daemon: its submission failed although the main scheduler accepted it, or a poll missed it. Its
agent cannot report, and would hold its node to the time limit. The scavenger remembers until the
daemon restarts which leases it gave up. Decides which leases are to be ended now;
:mod:`malletrain.daemon.lease_reconciler` ends them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from scavenger.interface import Lease, LeaseState

AGAIN_S = 30.0
"""Ending a lease takes its grace time; it is asked for again where it has not ended by then."""


class Strays:
    """Of one daemon."""

    def __init__(self) -> None:
        self._requested_at: dict[str, float] = {}
        """Lease → when its end was asked for last."""

    def to_end(self, leases: Iterable[Lease], active: Container[str], now: float) -> list[Lease]:
        """Those to be ended now.

        Args:
            leases: the leases that a poll has found.
            active: the ids of those that have not ended for the daemon.
            now: seconds.
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
            if now - self._requested_at.get(lease.id, -AGAIN_S) >= AGAIN_S
        ]
        self._requested_at.update((lease.id, now) for lease in due)
        return due
