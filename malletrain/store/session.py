"""Runs transactions on one database, and reads and writes rows of its tables.

Decides that a block of calls is one transaction, which exceptions report errors of the database,
and that a database of an earlier version is migrated and one of a later version refused.
:mod:`malletrain.store.store` decides which rows there are.

The statements of each decision step are built once and cached: building a statement and finding its
compiled form takes SQLAlchemy many times as long as SQLite takes to execute it. With thousands of
agents that was most of the daemon's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Insert,
    Select,
    Table,
    Update,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from malletrain.store import copies, migrations, schema
from malletrain.store.database import (
    StatementRefused,
    StoreError,
    advice,
    schema_version,
    shown_url,
)
from malletrain.store.records import (
    Named,
    Row,
    decode,
    decode_values,
    encode_values,
    field_names,
)

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


MAX_PATTERN_LENGTH = 10_000
"""Maximum length of a prefix by which rows are searched, characters. For a much longer one SQLite
raises an error, and an error of the database ends the daemon.
"""


class Session:
    """Access to a database from one thread. Transactions nest.

    Args:
        engine: the database.
        verify: called before each transaction; raises StoreError if the database no longer belongs
            to this process.
    """

    def __init__(self, engine: Engine, verify: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._verify = verify
        self._connection: Connection | None = None

    def close(self) -> None:
        """Close the database. No data is lost without this call."""
        self._engine.dispose()

    @property
    def url(self) -> str:
        """The database's URL without its password."""
        return shown_url(self._engine.url)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run the block as one transaction: it is committed as a whole, or rolled back if an
        exception leaves the block.

        Raises:
            StoreError: the database refuses.
        """
        if self._connection is not None:
            yield self._connection
            return
        self._verify()
        try:
            with self._engine.begin() as connection:
                self._connection = connection
                try:
                    yield connection
                finally:
                    self._connection = None
        except (DBAPIError, PoolTimeout) as error:
            raise self._refusal(error) from error

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Set a savepoint in the open transaction. If an exception leaves the block, only the block
        is rolled back.

        Raises:
            StoreError: the database refuses.
        """
        if self._connection is None:
            raise RuntimeError("No transaction is open that could have a savepoint.")
        # The driver is called directly: SQLAlchemy's savepoints cost more than most changes.
        driver: Any = self._connection.connection.driver_connection
        try:
            driver.execute("SAVEPOINT malletrain")
            try:
                yield
            except BaseException:
                driver.execute("ROLLBACK TO SAVEPOINT malletrain")
                raise
            driver.execute("RELEASE SAVEPOINT malletrain")
        except (DBAPIError, self._engine.dialect.loaded_dbapi.Error) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> StoreError:
        """Return the StoreError that reports an error of the database."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        message = str(cause).strip().partition("\n")[0].rstrip(".")
        driver: Any = self._engine.dialect.loaded_dbapi
        statement = isinstance(cause, driver.DataError | driver.IntegrityError)
        return (StatementRefused if statement else StoreError)(
            f"The database {self.url} refused: {message}. Nothing of this transaction was saved."
            f"{advice(message)}"
        )

    def migrate(self) -> None:
        """Migrate the database to this version. An SQLite file is copied first, so that the
        migration can be undone. Raises StoreError if the database is of a later version or cannot
        be copied.
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
                self._back_up(current)
            migrations.upgrade(connection)

    def _back_up(self, version: str) -> None:
        """Copy the last committed state of an SQLite file."""
        path = self._engine.url.database
        if self._engine.dialect.name != "sqlite" or not path or path == ":memory:":
            return
        copy = Path(f"{path}.schema-{version}-{datetime.now():%Y%m%d-%H%M%S-%f}")
        copies.remove_unfinished(copy.parent, f"{Path(path).name}.schema-")
        try:
            copies.backup(f"sqlite:///{path}", copy)
        except copies.CopyError as error:
            raise StoreError(
                f"The database {self.url} is to be migrated to schema {schema.HEAD}, and cannot be "
                f"copied before: {error} Nothing has changed."
            ) from None

    def all(
        self, query: Select[Any], kind: type[Row], where: Mapping[str, Any] | None = None
    ) -> list[Row]:
        """Return the rows of a query. ``where``: its parameters; None if it has none."""
        with self.transaction() as connection:
            result = connection.execute(query, where or {})
            return decode(kind, tuple(result.keys()), result)

    def one(
        self, query: Select[Any], kind: type[Row], where: Mapping[str, Any] | None = None
    ) -> Row | None:
        """Return the first row of a query; None if there is none."""
        return next(iter(self.all(query, kind, where)), None)

    def put(self, table: Table, values: Mapping[str, Any]) -> None:
        """Update the row with the primary key in ``values``, or insert it. There is only one writer
        at a time, so no other change comes in between.
        """
        key = {AT + column.name: values[column.name] for column in table.primary_key}
        with self.transaction() as connection:
            changing = updating(table, tuple(values))
            if connection.execute(changing, {**values, **key}).rowcount == 0:
                connection.execute(inserting(table), values)

    def append(self, table: Table, values: Mapping[str, Any]) -> None:
        """Insert a row that the database numbers, without returning its number. The driver is
        called directly, as in :meth:`savepoint`, because most decision steps append an event.
        """
        statement = appending(table, tuple(values), self._engine.dialect)
        order = statement.positiontup
        parameters = values if order is None else tuple(values[name] for name in order)
        with self.transaction() as connection:
            driver: Any = connection.connection.driver_connection
            try:
                driver.execute(statement.string, parameters)
            except self._engine.dialect.loaded_dbapi.Error as error:
                raise self._refusal(error) from error

    def add(self, table: Table, rows: list[dict[str, Any]]) -> None:
        """Insert new rows in one statement."""
        if rows:
            with self.transaction() as connection:
                connection.execute(inserting(table), rows)

    def change(
        self, table: Table, kind: type[Named], row: Named, changes: Mapping[str, Any]
    ) -> Named:
        """Set fields of a row in memory, and store them by its id. The row is not read again.

        Args:
            table: table of the row.
            kind: class of the row.
            row: the row before the change.
            changes: field → new value.

        Returns:
            The changed row, as the database would return it.

        Raises:
            StoreError: there is no such row.
            TypeError: a row of this kind has no such field.
        """
        return self.change_all(table, kind, [(row, changes)])[0]

    def change_all(
        self, table: Table, kind: type[Named], changes: Sequence[tuple[Named, Mapping[str, Any]]]
    ) -> list[Named]:
        """Like :meth:`change` for many rows. The same fields of each row are changed.

        Args:
            table: table of the rows.
            kind: class of the rows.
            changes: each row with its new values by field.
        """
        if not changes or not changes[0][1]:
            return [row for row, _ in changes]
        names = tuple(changes[0][1])
        _check_fields(kind, names)
        columns = [encode_values({name: change[name] for name in names}) for _, change in changes]
        keyed = [
            {**values, AT + "id": row.id} for (row, _), values in zip(changes, columns, strict=True)
        ]
        with self.transaction() as connection:
            parameters: Any = keyed if len(keyed) > 1 else keyed[0]
            if connection.execute(updating(table, names), parameters).rowcount != len(keyed):
                ids = set(connection.execute(select(table.c.id)).scalars())
                missing_id = next(each[AT + "id"] for each in keyed if each[AT + "id"] not in ids)
                raise StatementRefused(
                    f'The database has no row "{missing_id}" in {table.name}; it was never stored.'
                )
        return [
            replace(row, **decode_values(values))
            for (row, _), values in zip(changes, columns, strict=True)
        ]

    def update(self, table: Table, kind: type[Row], row_id: str, changes: Mapping[str, Any]) -> Row:
        """Set fields of the row with this id, and return the row.

        Args:
            table: table of the row.
            kind: class of the row.
            row_id: id of the row.
            changes: field → new value.

        Raises:
            StoreError: there is no such row.
            TypeError: a row of this kind has no such field.
        """
        _check_fields(kind, changes)
        with self.transaction() as connection:
            if changes:
                connection.execute(
                    updating(table, tuple(changes)),
                    {**encode_values(changes), AT + "id": row_id},
                )
            row = self.one(reading(table), kind, {AT + "id": row_id})
            if row is None:
                raise StatementRefused(
                    f'The database has no row "{row_id}" in {table.name}; it was never stored.'
                )
            return row

    def counts(self, table: Table, column: str, *where: ColumnElement[bool]) -> dict[str, int]:
        """Return value of a column → number of rows, for the rows that match ``where``."""
        query = select(table.c[column], func.count()).where(*where).group_by(table.c[column])
        with self.transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def get_meta(self, key: str) -> str | None:
        """Return a value about the daemon itself; None if it is not stored."""
        with self.transaction() as connection:
            value = connection.execute(reading_meta(), {"key": key}).scalar()
            return None if value is None else str(value)

    def set_meta(self, key: str, value: str) -> None:
        """Store a value about the daemon itself."""
        self.put(schema.meta, {"key": key, "value": value})

    def next(self, counter: str, count: int = 1) -> int:
        """Advance a counter by ``count``, and return the first of the new numbers. They start at 1
        and are never reused.
        """
        with self.transaction():
            before = int(self.get_meta(counter) or 0)
            self.set_meta(counter, str(before + count))
            return before + 1


def _check_fields(kind: type[Row], names: Iterable[str]) -> None:
    """Raise TypeError if rows of this kind do not have these fields, or they cannot be set."""
    unknown = set(names).difference(field_names(kind)) | set(names) & {"id"}
    if unknown:
        raise TypeError(
            f"A {kind.__name__} has no field {', '.join(sorted(unknown))} that can be set."
        )
