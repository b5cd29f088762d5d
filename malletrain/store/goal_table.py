"""Stores the goals of jobs and the past numbers of nodes in the database."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, select

from malletrain.store import schema
from malletrain.store.records import GoalRow, NodeSpanRow
from malletrain.store.rows import encode
from malletrain.store.session import Session


class GoalTable:
    """Reads and writes goals, one row per job, and the past numbers of nodes."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: GoalRow) -> GoalRow:
        """Store a job's goals: insert or replace its row."""
        self._db.put(schema.goals, encode(row))
        return row

    def of(self, job_id: str) -> GoalRow | None:
        """Return the job's goals; None if it has none."""
        return self._db.one(select(schema.goals).where(schema.goals.c.job == job_id), GoalRow)

    def all(self) -> dict[str, GoalRow]:
        """Return job → its goals, for jobs that have any."""
        return {row.job: row for row in self._db.all(select(schema.goals), GoalRow)}

    def put_spans(self, rows: Iterable[NodeSpanRow], forget_before: float) -> None:
        """Store numbers of nodes, and delete rows before ``forget_before``, epoch seconds."""
        table = schema.node_history
        with self._db.transaction() as connection:
            for row in rows:
                self._db.put(table, encode(row))
            connection.execute(delete(table).where(table.c.began < forget_before))

    def spans(self, since: float) -> list[NodeSpanRow]:
        """Return the numbers of nodes since a time, oldest first."""
        table = schema.node_history
        return self._db.all(
            select(table).where(table.c.began >= since).order_by(table.c.began), NodeSpanRow
        )
