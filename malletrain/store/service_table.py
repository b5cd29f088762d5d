"""Stores the service to each party in the database."""

from __future__ import annotations

from sqlalchemy import select

from malletrain.store import schema
from malletrain.store.records import ServiceRow
from malletrain.store.rows import encode
from malletrain.store.session import Session


class ServiceTable:
    """Reads and writes the service, one row per party."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: ServiceRow) -> None:
        """Store the service to a party."""
        self._db.put(schema.service, encode(row))

    def all(self) -> list[ServiceRow]:
        """Return the service to each party, in order of their names."""
        return self._db.all(select(schema.service).order_by(schema.service.c.party), ServiceRow)
