"""Deletes old leases and ended jobs. Decides in which order and how many at a time; the
configuration has the retention time.

The audit log is append-only and stays.
"""

from __future__ import annotations

from sqlalchemy import delete, select

from malletrain.store import schema
from malletrain.store.session import Session

AT_ONCE = 1000
"""Maximum number of jobs, and of leases, that one call deletes. The daemon is blocked meanwhile."""
JOB_TABLES = (
    schema.observations,
    schema.rescales,
    schema.profiles,
    schema.metric_points,
    schema.goals,
)


def forget(db: Session, before: float) -> int:
    """Delete leases and jobs that ended before this time (epoch seconds), the oldest first, with
    their measurements. Returns the number of deleted leases and jobs; 0 if none is left.
    """
    with db.transaction() as connection:
        counts = {}
        for table in (schema.jobs, schema.leases):
            query = select(table.c.id).where(table.c.ended < before)
            ids = connection.execute(query.order_by(table.c.number).limit(AT_ONCE)).scalars().all()
            for child in JOB_TABLES if table is schema.jobs else ():
                connection.execute(delete(child).where(child.c.job.in_(ids)))
            connection.execute(delete(table).where(table.c.id.in_(ids)))
            counts[table.name] = len(ids)
        return sum(counts.values())
