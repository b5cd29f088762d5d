"""Stores the controller's counters of what each share was served, and reads them at the start.

Decides when they are stored.
"""

from __future__ import annotations

from malletrain.core.controller import Controller
from malletrain.core.shares import PartyService
from malletrain.store.records import ServiceRow
from malletrain.store.store import Store

EVERY_S = 60.0
"""What is counted after the last time is lost when the daemon is killed."""


class ShareKeeper:
    """The counters of one controller. Its calls belong into steps of the core."""

    def __init__(self, controller: Controller, store: Store) -> None:
        self._controller = controller
        self._store = store
        self._saved_at = 0.0

    def restore(self, now: float) -> None:
        """Take up what was kept."""
        settings, rows = self._controller.shares.settings, self._store.services.all()
        if settings is None or not rows:
            return
        newest = max(row.updated for row in rows)
        services = {}
        for row in rows:  # what was forgotten before the others has an older row
            factor = 0.5 ** ((newest - row.updated) / settings.half_life_s)
            services[row.party] = PartyService(row.served, row.due, row.seconds).later(factor)
        # While no daemon ran the clock may have been set back.
        self._controller.shares.restore(services, min(newest, now))

    def keep(self, now: float, *, at_once: bool = False) -> None:
        """Write the counters down when it is time to, or ``at_once``."""
        shares = self._controller.shares
        if shares.settings is None or (now < self._saved_at + EVERY_S and not at_once):
            return
        self._saved_at = now
        for party, service in shares.services().items():
            self._store.services.put(
                ServiceRow(party, service.served, service.due, service.seconds, now)
            )
