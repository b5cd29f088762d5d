"""Times in the store that something is counted from, put forward or back with the host's clock.

Decides which they are. Times that are only told (of events, of a job's submission and end, of what
was measured) stay as they were written.
"""

from __future__ import annotations

from sqlalchemy import Connection, update

from malletrain.store import schema

_COUNTED_FROM = (
    (schema.leases, schema.leases.c.ended, ("requested", "started")),
    (schema.jobs, schema.jobs.c.ended, ("last_broke",)),
    (schema.goals, None, ("charged_at",)),
    (schema.service, None, ("updated",)),
)
"""Table, its column that has a value where a row counts no more (None: all count), columns."""


def shift_times(connection: Connection, by_s: float) -> None:
    """Add ``by_s`` seconds, in the transaction of ``connection``, to the times that go on."""
    for table, over, columns in _COUNTED_FROM:
        for name in columns:
            column = table.c[name]
            change = update(table).where(column.is_not(None)).values({name: column + by_s})
            connection.execute(change if over is None else change.where(over.is_(None)))
