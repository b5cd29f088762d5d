"""One daemon at a time has a database. The one that comes second waits, and takes over when the
first one ends or is not there any more.

Decides when a database is free, and when its owner has to stop because it may have lost it. SQLite:
a lock on a file beside the database, which ends with its process. PostgreSQL:
:mod:`malletrain.store.postgres_lock`. Other databases have no such lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from sqlalchemy.engine import make_url

from malletrain.store.database import StoreError
from malletrain.store.postgres_lock import PostgresLock

BEAT_S = 5.0
"""How often an owner looks whether the database is still its own."""
FENCE_S = 15.0
"""An owner that has not looked for so long begins no transaction before it has."""
ASK_S = 1.0
"""How often one that waits asks for the database."""


class Lock(Protocol):
    """The lock of one database, for one daemon."""

    may_be_lost: bool
    """Whether another daemon can have it while its owner runs, as when a connection is lost."""

    def take(self) -> str | None:
        """Take it if it is free: None. Else who has it, "" where that is not known at this moment.
        Raises StoreError.
        """
        ...

    def wait(self) -> None:
        """Show the owner that this daemon waits."""
        ...

    def look(self) -> list[str]:
        """Who waits for it. Raises StoreError where it is not held any more."""
        ...

    def close(self) -> None:
        """Give it back, or wait no longer."""
        ...


class Ownership:
    """A database that this process has. Give it back with :meth:`close`, or use it as a context
    manager.
    """

    def __init__(self, lock: Lock | None, clock: Callable[[], float]) -> None:
        self._lock = lock
        self._clock = clock
        self._looked = clock()
        self._one = threading.Lock()

    def look(self) -> list[str]:
        """Daemons that wait for the database. Call it every BEAT_S seconds, in any thread. Raises
        StoreError where another one may have it.
        """
        with self._one:
            waiting = self._lock.look() if self._lock is not None else []
            self._looked = self._clock()
            return waiting

    def verify(self) -> None:
        """Look again if that was long ago: this process may have stood still while another daemon
        took over. Raises StoreError.
        """
        if self._clock() - self._looked > FENCE_S:
            self.look()

    def close(self) -> None:
        """Give the database back."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def own(
    url: str,
    who: str,
    waits: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> Ownership:
    """Take the database at ``url``; where another daemon has it, wait until it is free.

    Where a lock can be lost, who waited waits for FENCE_S more before it begins: the former owner
    may have lost no more than its connection, and has to notice.

    Args:
        url: of the database, for SQLAlchemy.
        who: names this daemon to others.
        waits: called with the name of the owner, once for each owner.
        sleep: waits for so many seconds.
        clock: seconds that go on while the host is suspended.

    Raises:
        StoreError: the database cannot be used.
    """
    lock = _lock_of(url, who)
    if lock is None:
        return Ownership(None, clock)
    try:
        owner = ""
        while (has := lock.take()) is not None:
            if not owner or has not in ("", owner):
                owner = has or "a daemon that starts or ends at this moment"
                waits(owner)
            lock.wait()
            sleep(ASK_S)
        if owner and lock.may_be_lost:
            sleep(FENCE_S)
            lock.look()
    except BaseException:
        lock.close()
        raise
    return Ownership(lock, clock)


def _lock_of(url: str, who: str) -> Lock | None:
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        return PostgresLock(url, who)
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return FileLock(Path(str(parsed.database)), who)
    return None


class FileLock:
    """The lock of an SQLite file: ``flock`` on a file beside it; who waits has a second one."""

    may_be_lost = False

    def __init__(self, database: Path, who: str) -> None:
        self._database, self._who = database, who
        self._owner = Path(f"{database}.owner")
        self._waiting = Path(f"{database}.waiting")
        self._handles: dict[Path, int] = {}

    def take(self) -> str | None:
        """See :class:`Lock`."""
        has = self._try(self._owner)
        if has is None:
            self._drop(self._waiting)
        return has

    def wait(self) -> None:
        """See :class:`Lock`."""
        self._try(self._waiting)  # one of several that wait is enough

    def look(self) -> list[str]:
        """See :class:`Lock`. A file lock is held until its process ends."""
        has = self._try(self._waiting)
        self._drop(self._waiting)
        return [has or "another daemon"] if has is not None else []

    def close(self) -> None:
        """See :class:`Lock`."""
        for path in list(self._handles):
            self._drop(path)

    def _try(self, path: Path) -> str | None:
        """Lock a file: None. Else what stands in it."""
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
            has = os.pread(handle, 1000, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            return has
        except OSError as error:
            os.close(handle)
            raise StoreError(
                f"The lock {path} cannot be taken: {error.strerror}. Put the database on a file "
                "system with locks."
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock is what counts
            os.ftruncate(handle, 0)
            os.pwrite(handle, self._who.encode(), 0)
        self._handles[path] = handle
        return None

    def _drop(self, path: Path) -> None:
        if (handle := self._handles.pop(path, None)) is not None:
            os.close(handle)
