"""Stores the controller's counters of the service to each share, and restores them at the start.

Decides when they are stored.
"""

from __future__ import annotations

from malletrain.core.controller import Controller
from malletrain.core.shares import PartyService
from malletrain.store.records import ServiceRow
from malletrain.store.store import Store

INTERVAL_S = 60.0
"""Interval at which the counters are stored, seconds. A daemon that is killed loses what was
counted since.
"""


class ShareKeeper:
    """The counters of one controller. Call its methods within transactions of the core."""

    def __init__(self, controller: Controller, store: Store) -> None:
        self._controller = controller
        self._store = store
        self._saved_at = 0.0

    def restore(self, now: float) -> None:
        """Pass the stored counters to the controller."""
        settings, rows = self._controller.shares.settings, self._store.services.all()
        if settings is None or not rows:
            return
        newest = max(row.updated for row in rows)
        services = {}
        for row in rows:  # an older row has decayed less and is brought to the newest time
            factor = 0.5 ** ((newest - row.updated) / settings.half_life_s)
            services[row.party] = PartyService(row.served, row.due, row.seconds).later(factor)
        # The clock may have been set back while no daemon ran.
        self._controller.shares.restore(services, min(newest, now))

    def keep(self, now: float, *, at_once: bool = False) -> None:
        """Store the counters if the interval is over, or ``at_once``."""
        shares = self._controller.shares
        if shares.settings is None or (now < self._saved_at + INTERVAL_S and not at_once):
            return
        self._saved_at = now
        for party, service in shares.services().items():
            self._store.services.put(
                ServiceRow(party, service.served, service.due, service.seconds, now)
            )
