"""Shifts stored times after a change of the host's clock, if durations are computed from them.

Decides which times are shifted. Times that are only displayed (of events, measurements, a job's
submission and end) stay.
"""

from __future__ import annotations

from sqlalchemy import Connection, update

from malletrain.store import schema

_COUNTED_FROM = (
    (schema.leases, schema.leases.c.ended, ("requested", "started")),
    (schema.jobs, schema.jobs.c.ended, ("last_broke", "values_until")),
    (schema.goals, None, ("charged_at",)),
    (schema.service, None, ("updated",)),
)
"""Table, column that has a value if a row is no longer used (None if all are used), columns of the
times.
"""


def shift_times(connection: Connection, by_s: float) -> None:
    """Add ``by_s`` seconds to the times in use, in the transaction of ``connection``."""
    for table, ended_column, columns in _COUNTED_FROM:
        for name in columns:
            column = table.c[name]
            change = update(table).where(column.is_not(None)).values({name: column + by_s})
            connection.execute(
                change if ended_column is None else change.where(ended_column.is_(None))
            )
