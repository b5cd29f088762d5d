"""Opens database connections, set up so that a committed transaction survives ``kill -9`` and a
failed one leaves nothing.

Decides how SQLite is used (write-ahead log, locks taken at the start of a transaction, file
readable by its owner only), the time-outs of a server, when a server counts as stopped, and the
messages about an unusable URL. It knows no tables.

SQLite's write-ahead log needs memory that all processes with the database share, which the hosts of
a network file system do not have (sqlite.org, "Write-Ahead Logging", section 8). There only the
processes of one host may open the database. :func:`file_system_type` tells which it is.
"""

from __future__ import annotations

import functools
import os
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from malletrain.protocol.database_url import without_password

BUSY_TIMEOUT_MS = 10_000
"""Maximum time for which a transaction waits for another process that writes."""
SERVER_WAITS = {
    "connect_timeout": BUSY_TIMEOUT_MS // 1000,
    "tcp_user_timeout": BUSY_TIMEOUT_MS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
"""Time-outs of a PostgreSQL server whose host is silent (libpq, "Parameter Key Words"), unless the
URL sets them. The system's own time-out is a quarter of an hour, for which the daemon would block.
"""
SILENCE_S = 10.0
"""Time without an answer after which a second connection tries whether a PostgreSQL server still
runs, seconds.
"""
MAX_FAILED_PROBES = 2
"""Connections in a row that time out until the server counts as stopped. One alone can be due to a
server with too much work.
"""
_LOCKS = "lock_timeout"
_WAIT_S = 0.01


class StoreError(RuntimeError):
    """The database cannot be used or refused a transaction; the message is a sentence for the
    operator.
    """


class StatementRefused(StoreError):
    """The database works but refused one statement, because of its values."""


_RESTORE = (
    "It is damaged: stop the daemon, and restore the newest copy with `malletrain db "
    "restore --config FILE COPY`. Jobs that the copy knows continue; later leases are given "
    "back."
)
_SERVER = "Start its server or make it reachable; the daemon continues from the stored state."
_ADVICE = (
    ("malformed", _RESTORE),
    ("not a database", _RESTORE),
    (
        "locking protocol",
        "SQLite's write-ahead log does not work on this file system: set database in [daemon] to "
        "a file on a local disk, or to PostgreSQL.",
    ),
    ("locked", "Another process holds it: `fuser` on the file names it. End that one."),
    ("disk is full", "Make room on its file system; the daemon continues from the stored state."),
    (
        "read-only transaction",
        "It is a standby: name the primary in [daemon] database, or add "
        "target_session_attrs=read-write to its URL.",
    ),
    ("readonly", "Make the file and its directory the daemon's user's."),
    ("lock timeout", "Another session holds it: pg_stat_activity names it. End that one."),
    ("authentication failed", "Correct user and password in [daemon] database."),
    ('relation "', "Tables are missing: restore the newest copy with pg_restore."),
    ("does not exist", "Create it, or correct [daemon] database."),
    ("pg_hba.conf", "Allow the connection in its pg_hba.conf, or correct [daemon] database."),
    ("too many clients", "Its max_connections are in use: end some, or allow more."),
    ("connection slots", "Its max_connections are in use: end some, or allow more."),
    ("connection", _SERVER),
    ("database system is", _SERVER),
)
"""Part of an error message of SQLite or PostgreSQL → what to do. The first match counts."""


def advice(message: str) -> str:
    """Return what to do about an error of the database, as a sentence after a space; empty if
    unknown.
    """
    return next((f" {what}" for words, what in _ADVICE if words in message), "")


def open_engine(url: str) -> Engine:
    """Return an engine for the SQLAlchemy URL ``url``. A missing SQLite file is created. Raises
    StoreError.
    """
    try:
        # A server may have been restarted since the last transaction, so a connection is tested
        # before it is used.
        engine_url = parse_url(url)
        options: dict[str, Any] = (
            {"connect_args": {"timeout": BUSY_TIMEOUT_MS / 1000}}
            if url.startswith("sqlite")
            else {"pool_pre_ping": True, "connect_args": _waits(engine_url)}
        )
        engine = create_engine(engine_url, **options)
    except (ArgumentError, NoSuchModuleError) as error:
        raise _unusable(url, error) from None
    except ModuleNotFoundError as error:
        raise StoreError(
            f'The driver "{error.name}" for the database is not installed; install it (for '
            "PostgreSQL: pip install --find-links WHEELS 'malletrain[postgres]')."
        ) from None
    if engine.dialect.name == "sqlite":
        _create_privately(engine.url.database)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    elif engine.dialect.name == "postgresql" and _LOCKS not in str(engine_url.query.get("options")):
        event.listen(engine, "begin", _begin_postgresql)
    if engine.dialect.driver == "psycopg":
        event.listen(engine, "do_connect", _connect_psycopg)
    return engine


def parse_url(url: str) -> URL:
    """Return the parts of the SQLAlchemy URL ``url``. Raises StoreError if it has none."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as error:
        why = error if isinstance(error, ArgumentError) else "its port is not a number"
        raise _unusable(url, why) from None


def shown_url(url: URL | str) -> str:
    """Return the URL without its password, for messages."""
    text = url if isinstance(url, str) else url.render_as_string(hide_password=True)
    return without_password(text)


def _unusable(url: str, why: object) -> StoreError:
    return StoreError(
        f'"{shown_url(url)}" is not the URL of a database that SQLAlchemy knows: '
        f"{str(why).rstrip('.')}. Correct [daemon] database; in a password, write @ / : as "
        "%40 %2F %3A."
    )


def _waits(url: URL) -> dict[str, int]:
    """Return the time-outs for the driver of a server, without those that the URL sets."""
    if url.drivername not in ("postgresql", "postgresql+psycopg2", "postgresql+psycopg"):
        return {}
    return {name: value for name, value in SERVER_WAITS.items() if name not in url.query}


def _begin_postgresql(connection: Connection) -> None:
    # Not in the URL's options, because a connection pool (PgBouncer) refuses them, and not for the
    # whole connection, because such a pool shares it with others.
    connection.exec_driver_sql(f"SET LOCAL {_LOCKS} = {BUSY_TIMEOUT_MS}")


def _connect_psycopg(
    _dialect: Any, _record: Any, arguments: tuple[Any, ...], parameters: dict[str, Any]
) -> Any:
    connection = _psycopg_connection().connect(*arguments, **parameters)
    connection.parameters = (arguments, parameters)
    return connection


@functools.cache
def _psycopg_connection() -> Any:
    """Return a class of psycopg's connections that end when their server has stopped.

    The system of a server whose processes are stopped (SIGSTOP, a frozen container) still
    acknowledges all that it receives, so no time-out of TCP ends the wait for its answer. A server
    that works on a long statement does not answer either, but lets another connection in. A pool
    such as PgBouncer lets it in whatever its server does.
    """
    import psycopg

    class Connection(psycopg.Connection[Any]):
        parameters: tuple[tuple[Any, ...], dict[str, Any]] | None = None

        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            limited = _limit_silence(gen, self._answers_another, self._end)
            return super().wait(limited, *args, **options)

        def _answers_another(self) -> bool:
            if self.parameters is None:
                return True
            arguments, parameters = self.parameters
            try:
                psycopg.connect(*arguments, **_probe_parameters(parameters, self.info)).close()
            except psycopg.errors.ConnectionTimeout:
                return False
            except psycopg.Error:
                return True  # a refusal is an answer
            return True

        def _end(self) -> None:
            self.pgconn.finish()
            raise psycopg.OperationalError(
                f"no answer for {SILENCE_S:g} s, nor to {MAX_FAILED_PROBES} other connections"
            )

    return Connection


def _probe_parameters(parameters: Mapping[str, Any], silent: Any) -> dict[str, Any]:
    """Return the parameters of a connection to the server of a silent one. A URL can name several.

    Args:
        parameters: those with which the silent connection was made.
        silent: its psycopg.ConnectionInfo.
    """
    server: dict[str, Any] = {"host": silent.host, "port": silent.port}
    if silent.hostaddr:
        server["hostaddr"] = silent.hostaddr
    try:
        timeout_s = int(parameters.get("connect_timeout") or 0)
    except ValueError:
        timeout_s = 0
    if timeout_s <= 0:  # no limit, or the driver's of two minutes
        timeout_s = SERVER_WAITS["connect_timeout"]
    others = {name: value for name, value in parameters.items() if name != "hostaddr"}
    return {**others, **server, "connect_timeout": timeout_s}


def _limit_silence(
    gen: Generator[Any, Any, Any], answers: Callable[[], bool], end: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """Run one of psycopg's generators, which wait for a server.

    Args:
        gen: the generator.
        answers: called after each SILENCE_S seconds in which nothing arrived; returns whether the
            server answers another connection.
        end: called after MAX_FAILED_PROBES of these in a row without an answer; raises.
    """
    try:
        state = next(gen)
        heard_at, failed = time.monotonic(), 0
        while True:
            ready = yield state
            if ready:
                heard_at, failed = time.monotonic(), 0
            elif time.monotonic() - heard_at >= SILENCE_S:
                failed = 0 if answers() else failed + 1
                if failed >= MAX_FAILED_PROBES:
                    end()
                heard_at = time.monotonic()
            state = gen.send(ready)
    except StopIteration as end:
        return end.value


def _create_privately(path: str | None) -> None:
    """Create the database file readable by its owner only, because it has the jobs' environments.
    SQLite's side files get the same mode.
    """
    if not path or path == ":memory:":
        return
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(f"The database {path} cannot be opened: {error.strerror}.") from None


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    # the driver would commit before a CREATE TABLE; _begin_sqlite starts transactions
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    mode = _write_ahead(cursor)
    # Without a write-ahead log (some network file systems) NORMAL could corrupt the file when the
    # machine loses power.
    cursor.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _write_ahead(cursor: sqlite3.Cursor) -> str:
    """Turn the write-ahead log on. Return the resulting journal mode. SQLite does not wait for
    locks while it changes the mode, so of several processes that open a new database all but one
    would fail.
    """
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            return str(cursor.execute("PRAGMA journal_mode=WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= until:
                raise
            time.sleep(_WAIT_S)


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads and then writes could fail if another process wrote in between.
    # Taking the lock at its start makes it wait instead.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def schema_version(connection: Connection) -> str | None:
    """Return the schema version of the database; None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


MOUNTS = Path("/proc/self/mounts")
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
    }
)
"""Types of file systems that several hosts can mount."""
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system_type(path: Path, mounts: str) -> str:
    """Return the type of the file system of a path; empty if it is not known.

    Args:
        path: an absolute path without symbolic links. It need not exist.
        mounts: content of ``/proc/self/mounts`` (proc(5)).
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1]))
        # A later mount on the same directory hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind
