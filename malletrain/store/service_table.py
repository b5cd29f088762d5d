"""What each party was served of its share, in the database."""

from __future__ import annotations

from sqlalchemy import select

from malletrain.store import schema
from malletrain.store.records import ServiceRow
from malletrain.store.rows import encode
from malletrain.store.session import Session


class ServiceTable:
    """Reads and writes service, one row a party."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def put(self, row: ServiceRow) -> None:
        """Keep what a party was served."""
        self._db.put(schema.service, encode(row))

    def all(self) -> list[ServiceRow]:
        """What each party was served, by name."""
        return self._db.all(select(schema.service).order_by(schema.service.c.party), ServiceRow)
