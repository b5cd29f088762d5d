"""Lets one daemon at a time use a database. A second daemon waits, and takes over when the first
one ends or is lost.

Decides when a database is free, and when its owner has to stop because it may have lost it. SQLite:
a lock on a file next to the database, which ends with its process. PostgreSQL:
an advisory lock, which ends with its connection. Other databases have no such lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from malletrain.identity.state_directory import lock_refusal
from malletrain.store.database import StoreError, advice, open_engine, parse_url, shown_url

BEAT_S = 5.0
"""Interval at which an owner checks that the database is still its own, seconds."""
FENCE_S = 15.0
"""Maximum age of the last check at the start of a transaction, seconds. An owner with an older one
checks first.
"""
ASK_S = 1.0
"""Interval at which a waiting daemon tries to take the database, seconds."""


class Lock(Protocol):
    """The lock of one database, for one daemon."""

    may_be_lost: bool
    """Whether another daemon can have it while its owner runs, as when a connection is lost."""

    def take(self) -> str | None:
        """Take the lock if it is free. Return None if it was taken, else its owner; empty if the
        owner is not known at this moment. Raises StoreError.
        """
        ...

    def wait(self) -> None:
        """Show the owner that this daemon waits."""
        ...

    def check(self) -> list[str]:
        """Return the daemons that wait for the lock. Raises StoreError if it is no longer held."""
        ...

    def close(self) -> None:
        """Release the lock, or stop waiting."""
        ...


class Ownership:
    """Ownership of a database by this process. Release it with :meth:`close`, or use it as a
    context manager.
    """

    def __init__(self, lock: Lock | None, clock: Callable[[], float]) -> None:
        self._lock = lock
        self._clock = clock
        self._checked_at = clock()
        self._check_lock = threading.Lock()

    def check(self) -> list[str]:
        """Check the lock. Return the daemons that wait for the database. Call it every BEAT_S
        seconds, in any thread. Raises StoreError if another daemon may have the database.
        """
        with self._check_lock:
            waiting = self._lock.check() if self._lock is not None else []
            self._checked_at = self._clock()
            return waiting

    def verify(self) -> None:
        """Check the lock if the last check is older than FENCE_S: this process may have stood still
        while another daemon took over. Raises StoreError.
        """
        if self._clock() - self._checked_at > FENCE_S:
            self.check()

    def close(self) -> None:
        """Release the database."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def own(
    url: str,
    who: str,
    waits: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> Ownership:
    """Take the database at ``url``. If another daemon has it, wait until it is free.

    If the lock can be lost, a daemon that has waited waits for another FENCE_S. The former owner
    may have lost only its connection, and has to notice that first.

    Args:
        url: SQLAlchemy URL of the database.
        who: name of this daemon, for others.
        waits: called with the name of the owner, once for each owner.
        sleep: waits for a number of seconds.
        clock: returns seconds that advance while the host is suspended.

    Raises:
        StoreError: the database cannot be used.
    """
    lock = _lock_of(url, who)
    if lock is None:
        return Ownership(None, clock)
    try:
        owner = ""
        while (current_owner := lock.take()) is not None:
            if not owner or current_owner not in ("", owner):
                owner = current_owner or "a daemon that starts or ends at this moment"
                waits(owner)
            lock.wait()
            sleep(ASK_S)
        if owner and lock.may_be_lost:
            sleep(FENCE_S)
            lock.check()
    except BaseException:
        lock.close()
        raise
    return Ownership(lock, clock)


def _lock_of(url: str, who: str) -> Lock | None:
    parsed = parse_url(url)
    if parsed.get_backend_name() == "postgresql":
        return PostgresLock(url, who)
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return FileLock(Path(str(parsed.database)), who)
    return None


class FileLock:
    """Lock of an SQLite file: ``flock`` on a file next to it. A waiting daemon locks a second
    file.
    """

    may_be_lost = False

    def __init__(self, database: Path, who: str) -> None:
        self._database, self._who = database, who
        self._owner = Path(f"{database}.owner")
        self._waiting = Path(f"{database}.waiting")
        self._handles: dict[Path, int] = {}

    def take(self) -> str | None:
        """See :class:`Lock`."""
        owner_name = self._try(self._owner)
        if owner_name is None:
            self._drop(self._waiting)
        return owner_name

    def wait(self) -> None:
        """See :class:`Lock`."""
        self._try(self._waiting)  # one of several waiting daemons is enough

    def check(self) -> list[str]:
        """See :class:`Lock`. A file lock is held until its process ends."""
        owner_name = self._try(self._waiting)
        self._drop(self._waiting)
        return [owner_name or "another daemon"] if owner_name is not None else []

    def close(self) -> None:
        """See :class:`Lock`."""
        for path in list(self._handles):
            self._drop(path)

    def _try(self, path: Path) -> str | None:
        """Lock a file. Return None if it was locked, else the content of the file."""
        if path in self._handles:
            return None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"The lock {path} cannot be opened: {error.strerror}.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner_name = os.pread(handle, 1000, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            return owner_name
        except OSError as error:
            os.close(handle)
            raise StoreError(lock_refusal(f"The database {self._database}", error)) from None
        with contextlib.suppress(OSError):  # the disk may be full; the lock alone is enough
            os.ftruncate(handle, 0)
            os.pwrite(handle, self._who.encode(), 0)
        self._handles[path] = handle
        return None

    def _drop(self, path: Path) -> None:
        if (handle := self._handles.pop(path, None)) is not None:
            os.close(handle)


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
    """An advisory lock, which lasts as long as its connection. Decides when a silent owner has lost
    it.

    The lock belongs to a transaction, so that it works behind a connection pool (PgBouncer), too.
    The transaction reads no table and does not delay vacuum. Manual: "Explicit Locking", "The
    Statistics Collector" (pg_stat_activity).
    """

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

    def check(self) -> list[str]:
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
