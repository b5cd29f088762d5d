"""Transactions on one database, and rows in and out of its tables.

Decides that a block of calls is one transaction, what a refusal of the database is told as, and
that a database of an earlier version is migrated and one of a later version refused. Which rows
there are is :mod:`malletrain.store.store`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from malletrain.store import copies, migrations, schema
from malletrain.store.database import StatementRefused, StoreError, schema_version
from malletrain.store.rows import Row, decode, encode_values

LONGEST_PATTERN = 10_000
"""Characters of a text by whose beginning rows are looked for. Of some more SQLite makes an error,
and an error of the database is the end of the daemon.
"""


class Session:
    """One user of a database, in one thread. Transactions nest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    def close(self) -> None:
        """Close the database. Nothing is lost by not calling it."""
        self._engine.dispose()

    @property
    def url(self) -> str:
        """The database's URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Everything called inside is committed together, or not at all when an exception leaves
        the block.

        Raises:
            StoreError: the database refuses.
        """
        if self._connection is not None:
            yield self._connection
            return
        try:
            with self._engine.begin() as connection:
                self._connection = connection
                try:
                    yield connection
                finally:
                    self._connection = None
        except (DBAPIError, PoolTimeout) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            said = str(cause).strip().partition("\n")[0].rstrip(".")
            statement = isinstance(error, DataError | IntegrityError)
            raise (StatementRefused if statement else StoreError)(
                f"The database {self.url} refused: {said}. Nothing of this step was saved."
            ) from error

    def migrate(self) -> None:
        """Bring the database to this version. What an SQLite file was is kept beside it, for a way
        back. Raises StoreError for one of a later version, and where no copy can be made.
        """
        with self.transaction() as connection:
            current = schema_version(connection)
            if current == schema.HEAD:
                return
            if current is not None and current not in migrations.versions():
                raise StoreError(
                    f"The database {self.url} has schema version {current}; this malletrain "
                    f"knows versions up to {schema.HEAD}. It was written "
                    "by a later malletrain: run that version, or name another database in "
                    "[daemon] database."
                )
            if current is not None:
                self._keep(current)
            migrations.upgrade(connection)

    def _keep(self, version: str) -> None:
        """A copy of the database as it was committed last."""
        path = self._engine.url.database
        if self._engine.dialect.name != "sqlite" or not path or path == ":memory:":
            return
        copy = Path(f"{path}.schema-{version}-{datetime.now():%Y%m%d-%H%M%S-%f}")
        try:
            copies.backup(f"sqlite:///{path}", copy)
        except copies.CopyError as error:
            raise StoreError(
                f"The database {self.url} is to become schema {schema.HEAD}, and no copy of what "
                f"it is can be kept: {error} Nothing has changed."
            ) from None

    def all(self, query: Select[Any], kind: type[Row]) -> list[Row]:
        """The rows that the query finds."""
        with self.transaction() as connection:
            return [decode(kind, row) for row in connection.execute(query).mappings()]

    def one(self, query: Select[Any], kind: type[Row]) -> Row | None:
        """The first row that the query finds."""
        return next(iter(self.all(query, kind)), None)

    def put(self, table: Table, values: Mapping[str, Any]) -> None:
        """Update the row with the primary key that is in ``values``, or insert it. There is one
        writer at a time, so that nothing comes in between.
        """
        match = [column == values[column.name] for column in table.primary_key]
        with self.transaction() as connection:
            if connection.execute(update(table).where(*match).values(values)).rowcount == 0:
                connection.execute(insert(table).values(values))

    def update(self, table: Table, kind: type[Row], row_id: str, changes: Mapping[str, Any]) -> Row:
        """Set fields of the row with this id and return it.

        Raises:
            StoreError: there is no such row.
            TypeError: a row of this kind has no such field.
        """
        unknown = changes.keys() - {field.name for field in fields(kind)} | changes.keys() & {"id"}
        if unknown:
            raise TypeError(
                f"A {kind.__name__} has no field {', '.join(sorted(unknown))} that can be set."
            )
        with self.transaction() as connection:
            if changes:
                connection.execute(
                    update(table).where(table.c.id == row_id).values(encode_values(changes))
                )
            row = self.one(select(table).where(table.c.id == row_id), kind)
            if row is None:
                raise StatementRefused(
                    f'The database has no row "{row_id}" in {table.name}; it was never stored.'
                )
            return row

    def counts(self, table: Table, column: str, *where: ColumnElement[bool]) -> dict[str, int]:
        """How many rows there are of each value of the column, among those of ``where``."""
        query = select(table.c[column], func.count()).where(*where).group_by(table.c[column])
        with self.transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def get_meta(self, key: str) -> str | None:
        """A value that the daemon keeps about itself."""
        table = schema.meta
        query = select(table.c.value).where(table.c.key == key).with_for_update()
        with self.transaction() as connection:
            return connection.execute(query).scalar()

    def set_meta(self, key: str, value: str) -> None:
        """Keep a value about the daemon itself."""
        self.put(schema.meta, {"key": key, "value": value})

    def next(self, counter: str) -> int:
        """Count one further; the numbers of a counter begin at 1 and none is given twice."""
        with self.transaction():
            number = int(self.get_meta(counter) or 0) + 1
            self.set_meta(counter, str(number))
            return number
