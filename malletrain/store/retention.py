"""What is deleted when a site wants leases and ended jobs no longer kept. Decides in which order,
and how much at once; how long they are kept is the configuration's.

The audit log is append-only and stays.
"""

from __future__ import annotations

from sqlalchemy import delete, select

from malletrain.store import schema
from malletrain.store.session import Session

AT_ONCE = 1000
"""Jobs, and leases, of one call: the daemon waits for the database meanwhile."""
OF_A_JOB = (
    schema.observations,
    schema.rescales,
    schema.profiles,
    schema.metric_points,
    schema.goals,
)


def forget(db: Session, before: float) -> int:
    """Delete leases and jobs that ended before this time (epoch seconds), the oldest first, with
    what was measured of them. Returns how many; 0: there are no more.
    """
    with db.transaction() as connection:
        counts = {}
        for table in (schema.jobs, schema.leases):
            query = select(table.c.id).where(table.c.ended < before)
            ids = connection.execute(query.order_by(table.c.number).limit(AT_ONCE)).scalars().all()
            for child in OF_A_JOB if table is schema.jobs else ():
                connection.execute(delete(child).where(child.c.job.in_(ids)))
            connection.execute(delete(table).where(table.c.id.in_(ids)))
            counts[table.name] = len(ids)
        return sum(counts.values())
