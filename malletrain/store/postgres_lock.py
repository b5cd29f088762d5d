"""The lock of a PostgreSQL database: an advisory lock that lasts as long as its connection.

Decides when an owner that is silent is given up. The lock is that of a transaction, so that it
holds behind a pool of connections (PgBouncer), too; the transaction reads no table and holds up no
vacuum. Manual: "Explicit Locking", "The Statistics Collector" (pg_stat_activity).
"""

from __future__ import annotations

import contextlib

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from malletrain.store.database import StoreError, advice, open_engine

OWNER, WAITS = 0x4D54, 0x4D55
"""First halves of the keys of the two locks; the second half is that of the schema."""
SILENT_S = 60.0
"""An owner whose connection has been silent for so long is not there any more: its host has lost
power, or stands still. Its connection is closed, so that it stops where it is.
"""
_NAME = 63
"""Longest name of an application that PostgreSQL keeps, characters."""
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
_ANEW = text("SELECT pg_stat_clear_snapshot()")
"""Within a transaction pg_stat_activity says the same for ever, unless it is told to forget."""
_END = text("SELECT pg_terminate_backend(:pid)")


class PostgresLock:
    """See :class:`malletrain.store.ownership.Lock`."""

    may_be_lost = True

    def __init__(self, url: str, who: str) -> None:
        self._engine = open_engine(url)
        self._who = who
        self._connection: Connection | None = None
        self._shown = False

    def take(self) -> str | None:
        """See :class:`~malletrain.store.ownership.Lock`. An owner that is silent is cut off."""
        try:
            connection = self._begun()
            if connection.execute(_TAKE).scalar():
                return None
            connection.execute(_ANEW)
            for pid, name, silent_s in connection.execute(_HOLDERS, {"kind": OWNER}).all():
                if silent_s is not None and silent_s > SILENT_S:
                    connection.execute(_END, {"pid": pid})
                return str(name)
        except DBAPIError as error:
            raise self._refusal(error) from None
        return ""

    def wait(self) -> None:
        """See :class:`~malletrain.store.ownership.Lock`."""
        if self._shown:
            return
        try:
            self._begun().execute(_WAIT)
        except DBAPIError as error:
            raise self._refusal(error) from None
        self._shown = True

    def look(self) -> list[str]:
        """See :class:`~malletrain.store.ownership.Lock`."""
        try:
            if self._connection is None:
                raise StoreError(f"The database {self._url} is not this daemon's any more.")
            self._connection.execute(_ANEW)
            holders = self._connection.execute(_HOLDERS, {"kind": WAITS}).all()
            own = self._connection.execute(text("SELECT pg_backend_pid()")).scalar()
        except DBAPIError as error:
            raise self._refusal(error) from None
        return [str(name) for pid, name, _ in holders if pid != own]

    def close(self) -> None:
        """See :class:`~malletrain.store.ownership.Lock`."""
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):  # its server has gone, and the lock with it
                self._connection.close()
            self._connection = None
        self._engine.dispose()

    @property
    def _url(self) -> str:
        return self._engine.url.render_as_string(hide_password=True)

    def _begun(self) -> Connection:
        """The connection, with its one transaction."""
        if self._connection is None:
            self._connection = self._engine.connect()
            self._connection.execute(_SETTINGS, {"name": self._who[:_NAME]})
        return self._connection

    def _refusal(self, error: DBAPIError) -> StoreError:
        reason = str(error.orig).strip().partition("\n")[0].rstrip(".")
        return StoreError(
            f"The connection by which this daemon has the database {self._url} is lost ({reason}). "
            "Another daemon may have it from now on; this one waits for it when it is started "
            f"again.{advice(reason)}"
        )
