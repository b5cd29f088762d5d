"""Locks a PostgreSQL database with an advisory lock that lasts as long as its connection.

Decides when a silent owner has lost the lock. The lock belongs to a transaction, so that it works
behind a connection pool (PgBouncer), too. The transaction reads no table and does not delay vacuum.
Manual: "Explicit Locking", "The Statistics Collector" (pg_stat_activity).
"""

from __future__ import annotations

import contextlib

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from malletrain.store.database import StoreError, advice, open_engine, shown_url

OWNER, WAITS = 0x4D54, 0x4D55
"""First halves of the keys of the two locks; the second half is that of the schema."""
SILENT_S = 60.0
"""Time without activity after which an owner counts as lost, seconds: its host has lost power or
stands still. Its connection is closed, so that the owner stops if it comes back.
"""
_MAX_NAME_LENGTH = 63
"""Maximum length of an application's name in PostgreSQL, characters."""
_KEY = "hashtext(current_schema())"
_SETTINGS = text(
    "SELECT set_config('application_name', :name, true), "
    "set_config('idle_in_transaction_session_timeout', '0', true)"
)
_TAKE = text(f"SELECT pg_try_advisory_xact_lock({OWNER}, {_KEY})")
_WAIT = text(f"SELECT pg_try_advisory_xact_lock_shared({WAITS}, {_KEY})")
_HOLDERS = text(
    "SELECT a.pid, a.application_name, "
    "extract(epoch FROM clock_timestamp() - a.state_change)::float8 "
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND l.classid::bigint = :kind AND l.objid::bigint = ({_KEY}::bigint & 4294967295)"
)
_CLEAR_SNAPSHOT = text("SELECT pg_stat_clear_snapshot()")
"""Clears the snapshot that pg_stat_activity keeps within a transaction."""
_END = text("SELECT pg_terminate_backend(:pid)")


class PostgresLock:
    """See :class:`malletrain.store.ownership.Lock`."""

    may_be_lost = True

    def __init__(self, url: str, who: str) -> None:
        self._engine = open_engine(url)
        self._who = who
        self._connection: Connection | None = None
        self._wait_is_shown = False

    def take(self) -> str | None:
        """See :class:`~malletrain.store.ownership.Lock`. The connection of a silent owner is
        closed.
        """
        try:
            connection = self._open_connection()
            if connection.execute(_TAKE).scalar():
                return None
            connection.execute(_CLEAR_SNAPSHOT)
            for pid, name, silent_s in connection.execute(_HOLDERS, {"kind": OWNER}).all():
                if silent_s is not None and silent_s > SILENT_S:
                    connection.execute(_END, {"pid": pid})
                return str(name)
        except DBAPIError as error:
            raise self._refusal(error) from None
        return ""

    def wait(self) -> None:
        """See :class:`~malletrain.store.ownership.Lock`."""
        if self._wait_is_shown:
            return
        try:
            self._open_connection().execute(_WAIT)
        except DBAPIError as error:
            raise self._refusal(error) from None
        self._wait_is_shown = True

    def look(self) -> list[str]:
        """See :class:`~malletrain.store.ownership.Lock`."""
        try:
            if self._connection is None:
                raise StoreError(f"The database {self._url} no longer belongs to this daemon.")
            self._connection.execute(_CLEAR_SNAPSHOT)
            holders = self._connection.execute(_HOLDERS, {"kind": WAITS}).all()
            own_pid = self._connection.execute(text("SELECT pg_backend_pid()")).scalar()
        except DBAPIError as error:
            raise self._refusal(error) from None
        return [str(name) for pid, name, _ in holders if pid != own_pid]

    def close(self) -> None:
        """See :class:`~malletrain.store.ownership.Lock`."""
        if self._connection is not None:
            # If the server has stopped, the lock is released already.
            with contextlib.suppress(DBAPIError):
                self._connection.close()
            self._connection = None
        self._engine.dispose()

    @property
    def _url(self) -> str:
        return shown_url(self._engine.url)

    def _open_connection(self) -> Connection:
        """Return the connection with its open transaction."""
        if self._connection is None:
            self._connection = self._engine.connect()
            self._connection.execute(_SETTINGS, {"name": self._who[:_MAX_NAME_LENGTH]})
        return self._connection

    def _refusal(self, error: DBAPIError) -> StoreError:
        reason = str(error.orig).strip().partition("\n")[0].rstrip(".")
        return StoreError(
            f"The connection that holds the lock of the database {self._url} is lost ({reason}). "
            "Another daemon may have the database from now on; this one waits for it when it is "
            f"restarted.{advice(reason)}"
        )
