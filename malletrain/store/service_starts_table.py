"""Reads and writes the measured starts of services, one row per job and class of nodes."""

from __future__ import annotations

from sqlalchemy import select

from malletrain.store import schema
from malletrain.store.records import ServiceStartsRow
from malletrain.store.rows import encode
from malletrain.store.session import Session


class ServiceStartsTable:
    """The measured starts of services."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: ServiceStartsRow) -> None:
        """Store the starts of a service on a class of nodes: insert or replace the row."""
        self._db.put(schema.service_starts, encode(row))

    def of(self, job_id: str) -> dict[str, tuple[float, ...]]:
        """Return node class → measured starts of a service there, oldest first, seconds."""
        table = schema.service_starts
        rows = self._db.all(select(table).where(table.c.job == job_id), ServiceStartsRow)
        return {row.node_class: row.durations for row in rows}
