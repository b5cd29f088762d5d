"""The statements that the daemon makes at every step, each put together once.

To build one, and to find its compiled form, costs SQLAlchemy many times what SQLite needs to carry
it out: with thousands of agents that was most of the daemon's work. Decides nothing.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from sqlalchemy import Dialect, Insert, Select, Table, Update, bindparam, insert, select, update

from malletrain.store import schema

AT = "at_"
"""Before the name of a column of the primary key, where a statement looks for its value."""


@cache
def inserting(table: Table) -> Insert:
    """Insert a row, its columns given as parameters."""
    return insert(table)


@lru_cache(maxsize=64)
def appending(table: Table, columns: tuple[str, ...], dialect: Dialect) -> Any:
    """Insert a row of these columns and ask for nothing, as the driver of this dialect wants it: a
    compiled statement, of which ``positiontup`` is the order of the values (None: by name).
    """
    return insert(table).inline().compile(dialect=dialect, column_keys=list(columns))


@lru_cache(maxsize=1024)
def updating(table: Table, columns: tuple[str, ...]) -> Update:
    """Set these columns of the row whose primary key is given as parameters (:data:`AT`)."""
    conditions = [column == bindparam(AT + column.name) for column in table.primary_key]
    return update(table).where(*conditions).values({name: bindparam(name) for name in columns})


@cache
def reading(table: Table) -> Select[tuple[object, ...]]:
    """The row whose primary key is given as parameters (:data:`AT`)."""
    return select(table).where(*[c == bindparam(AT + c.name) for c in table.primary_key])


@cache
def reading_meta() -> Select[tuple[str]]:
    """A value that the daemon keeps about itself, held against others until the step ends."""
    table = schema.meta
    return select(table.c.value).where(table.c.key == bindparam("key")).with_for_update()
