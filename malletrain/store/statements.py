"""Builds the statements of each decision step once, and caches them.

Building a statement and finding its compiled form takes SQLAlchemy many times as long as SQLite
takes to execute it. With thousands of agents that was most of the daemon's work. Decides nothing.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from sqlalchemy import Dialect, Insert, Select, Table, Update, bindparam, insert, select, update

from malletrain.store import schema

AT = "at_"
"""Prefix of the parameters for columns of the primary key."""


@cache
def inserting(table: Table) -> Insert:
    """Return the statement that inserts a row. Its columns are parameters."""
    return insert(table)


@lru_cache(maxsize=64)
def appending(table: Table, columns: tuple[str, ...], dialect: Dialect) -> Any:
    """Return the compiled statement that inserts a row of these columns, for the driver of this
    dialect. Its ``positiontup`` is the order of the values; None if they are passed by name.

    Args:
        table: table of the row.
        columns: names of the columns.
        dialect: dialect of the database.
    """
    return insert(table).inline().compile(dialect=dialect, column_keys=list(columns))


@lru_cache(maxsize=1024)
def updating(table: Table, columns: tuple[str, ...]) -> Update:
    """Return the statement that sets these columns of a row. The primary key is passed as
    parameters (:data:`AT`).
    """
    conditions = [column == bindparam(AT + column.name) for column in table.primary_key]
    return update(table).where(*conditions).values({name: bindparam(name) for name in columns})


@cache
def reading(table: Table) -> Select[tuple[object, ...]]:
    """Return the query for one row. The primary key is passed as parameters (:data:`AT`)."""
    return select(table).where(*[c == bindparam(AT + c.name) for c in table.primary_key])


@cache
def reading_meta() -> Select[tuple[str]]:
    """Return the query for a value about the daemon itself. It is locked until the transaction
    ends.
    """
    table = schema.meta
    return select(table.c.value).where(table.c.key == bindparam("key")).with_for_update()
