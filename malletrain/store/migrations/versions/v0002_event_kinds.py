"""Renames kinds of events to terms of batch scheduling. Drops unused data: the history of
observations, the jobs' node-seconds.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

RENAMED = {
    "node-unfit": "node-rejected",
    "job-broke": "workers-failed",
    "job-interrupted": "nodes-donated",
    "lease-given-back": "lease-released",
}


def upgrade() -> None:
    op.drop_table("observation_history")
    op.drop_column("jobs", "node_seconds")
    before, after = _append_only_off_and_on()
    for statement in before:
        op.execute(statement)
    events = sa.table("events", sa.column("kind"))
    for old, new in RENAMED.items():
        op.execute(events.update().where(events.c.kind == old).values(kind=new))
    for statement in after:
        op.execute(statement)


def _append_only_off_and_on() -> tuple[list[str], list[str]]:
    """Return the statements that disable and enable the triggers of the event table."""
    refusal = "The event table is the audit log: events are added, never changed or removed."
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        verbs = ("UPDATE", "DELETE")
        return [f"DROP TRIGGER events_no_{verb.lower()}" for verb in verbs], [
            f"CREATE TRIGGER events_no_{verb.lower()} BEFORE {verb} ON events BEGIN SELECT "
            f"RAISE(ABORT, '{refusal}'); END"
            for verb in verbs
        ]
    if dialect == "postgresql":
        return ["ALTER TABLE events DISABLE TRIGGER events_append_only"], [
            "CREATE OR REPLACE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{refusal}'; END $$",
            "ALTER TABLE events ENABLE TRIGGER events_append_only",
        ]
    return [], []
