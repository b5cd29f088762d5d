"""Owns the rows of leases that have not ended, in the store and in memory. Only this module changes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from malletrain.protocol.event_kinds import LeaseStatus
from malletrain.store.records import LeaseRow
from malletrain.store.store import Store


class LeaseRows:
    """Rows of leases by id. Change them within a transaction of the core."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.active: dict[str, LeaseRow] = {row.id: row for row in store.active_leases()}

    def add(self, rows: Sequence[LeaseRow]) -> None:
        """Add new leases."""
        self._store.add_leases(rows)
        self.active.update((row.id, row) for row in rows)

    def update(self, lease: str, **changes: Any) -> LeaseRow:
        """Change fields of a lease that has not ended. Returns the new row."""
        self.update_all({lease: changes})
        return self.active[lease]

    def update_all(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change leases (by id) that have not ended: the same fields of each. Unchanged rows are
        not written, because after a restart all agents report what the store already has.
        """
        updates = [
            (row, fields)
            for row, fields in ((self.active[lease], fields) for lease, fields in changes.items())
            if any(getattr(row, name) != value for name, value in fields.items())
        ]
        self.active.update((row.id, row) for row in self._store.change_leases(updates))

    def end(self, lease: str, reason: str, now: float) -> LeaseRow | None:
        """Record the end of a lease.

        Args:
            lease: id of the lease.
            reason: why it ended, words without a full stop.
            now: time of its end, seconds.

        Returns:
            Its previous row; None if it had ended already.
        """
        row = self.active.pop(lease, None)
        if row is not None:
            ended = {"state": LeaseStatus.ENDED, "ended": now, "end_reason": reason}
            self._store.change_leases([(row, ended)])
        return row

    def on(self, node: str) -> str | None:
        """Return the first lease on the node; None if there is none."""
        return next((row.id for row in self.active.values() if row.node == node), None)
