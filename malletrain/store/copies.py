"""Backs up, restores, checks and exports an SQLite database, also while it is in use.

Decides which copies are valid. Runs on the head node, in its own processes, without the daemon.
SQLite's online backup makes a consistent snapshot even if the database is written meanwhile.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from malletrain.protocol.counting import counted
from malletrain.store.database import StoreError, parse_url, shown_url
from malletrain.store.migrations import versions
from malletrain.store.records import is_json
from malletrain.store.schema import HEAD, metadata

BUSY_S = 30.0
"""Maximum time to wait for a locked database, seconds."""
EXPORTED = ("jobs", "leases", "events")
"""Tables that are exported."""
SIDE_FILES = ("-wal", "-shm")
"""Suffixes of the files next to a database in WAL mode."""


SKIPPED_LEASE_IDS = 1_000
"""Number of lease ids that are skipped after a restore, because leases that are newer than the copy
may still have them.
"""


class CopyError(RuntimeError):
    """The operation failed; the message is a sentence for the operator."""


def backup(url: str, target: Path) -> int:
    """Copy the database at ``url`` to ``target``. Return the size of the copy, bytes. Raises
    CopyError.
    """
    source = _file_of(url)
    if target.exists():
        raise CopyError(f"{target} exists already; give another name.")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.close(handle)
        with _open(source) as source_connection, _open(part) as copy_connection:
            source_connection.backup(copy_connection)
            # The copy has to be a single file.
            copy_connection.execute("PRAGMA journal_mode=DELETE")
        _checked_version(part)
        _sync(part)
        os.link(part, target)
        return target.stat().st_size
    except OSError as error:
        raise CopyError(f"{target} cannot be written: {error.strerror}.") from None
    finally:
        for path in (part, *(Path(f"{part}{side}") for side in SIDE_FILES)):
            path.unlink(missing_ok=True)


def remove_unfinished(folder: Path, prefix: str) -> None:
    """Remove what copies that were interrupted (SIGKILL, a power failure) have left in ``folder``.
    Copies whose process still runs are kept, and so is what cannot be removed.

    Args:
        folder: the directory of the copies.
        prefix: beginning of the copies' names.
    """
    for part in folder.glob(f".{glob.escape(prefix)}*.part"):
        pid = part.name.split(".")[-2]
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_running(int(pid))):
            for path in (part, *(Path(f"{part}{side}") for side in SIDE_FILES)):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def restore(url: str, copy: Path) -> Path | None:
    """Replace the database at ``url``, which must not be in use, with ``copy``. Return the backup
    of the old database; None if there was none. Raises CopyError.
    """
    target = _file_of(url, must_exist=False)
    version = _checked_version(copy)
    if version not in versions():
        raise CopyError(
            f"{copy} was written by a later malletrain (schema {version}); restore it with that."
        )
    backup = None
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with _open(copy) as source_connection, _open(part) as copy_connection:
            source_connection.backup(copy_connection)
            copy_connection.execute(
                "INSERT INTO meta (key, value) VALUES ('last_lease', ?1) "
                "ON CONFLICT (key) DO UPDATE SET value = CAST(value + ?1 AS TEXT)",
                (SKIPPED_LEASE_IDS,),
            )
            copy_connection.commit()
        _sync(part)
        if target.exists():
            backup = target.with_name(f"{target.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
            _back_up(target, backup)
        for side in SIDE_FILES:
            Path(f"{target}{side}").unlink(missing_ok=True)
        os.replace(part, target)
        _sync(target.parent)
    except OSError as error:
        raise CopyError(f"{target} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)
    return backup


def _back_up(target: Path, backup: Path) -> None:
    """Link a database under a second name. Its write-ahead log is merged first; if the database is
    too damaged for that, the log is linked, too.
    """
    try:
        with _open(target) as old:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except CopyError:
        for side in SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.link(f"{target}{side}", f"{backup}{side}")
    os.link(target, backup)


def vacuum(url: str) -> tuple[int, int]:
    """Return the disk space of deleted rows to the file system. The database at ``url`` must not be
    in use. Return its size before and after, bytes. Raises CopyError.
    """
    path = _file_of(url)
    _checked_version(path)
    with _open(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = path.stat().st_size
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return before, path.stat().st_size


def check(url: str) -> str:
    """Describe the database at ``url`` in a sentence. Raises CopyError if it is damaged."""
    path = _file_of(url)
    version = _checked_version(path)
    with _open(path) as connection:
        counts = [
            counted(
                connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0],
                name.removesuffix("s"),
            )
            for name in EXPORTED
        ]
    newest = "" if version == HEAD else f"; this malletrain will migrate it to {HEAD}"
    if version not in versions():
        newest = "; it was written by a later malletrain: run that version"
    return f"{path} is whole: {', '.join(counts)}; schema {version}{newest}."


def export(url: str, out: TextIO) -> None:
    """Write all rows of jobs, leases and events to ``out``, as JSON, one per line. Raises
    CopyError.
    """
    with _open(_file_of(url)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")  # a consistent snapshot
        for table in (metadata.tables[name] for name in EXPORTED):
            key = ", ".join(column.name for column in table.primary_key)
            for row in connection.execute(f"SELECT * FROM {table.name} ORDER BY {key}"):
                fields = {name: _value(name, row[name]) for name in row.keys()}  # noqa: SIM118
                out.write(json.dumps({"table": table.name, **fields}) + "\n")


def _value(column: str, value: Any) -> Any:
    """Return the value of a column. JSON columns are text in SQLite and are decoded."""
    if is_json(column) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _file_of(url: str, must_exist: bool = True) -> Path:
    try:
        parsed = parse_url(url)
    except StoreError as error:
        raise CopyError(str(error)) from None
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise CopyError(
            f"{shown_url(parsed)} is not an SQLite file; use the tools of that database (pg_dump)."
        )
    path = Path(os.path.realpath(parsed.database))  # SQLite's side files are beside the file itself
    if must_exist and not path.exists():
        raise CopyError(f"There is no database at {path}; has the daemon run with this file?")
    return path


@contextlib.contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():  # SQLite would create it
        raise CopyError(f"There is no file {path}.")
    try:
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CopyError(f"{path} cannot be used as a database: {error}.") from None


def _checked_version(path: Path) -> str:
    """Return the schema version of a database. Raises CopyError if it is damaged."""
    with _open(path) as connection:
        problems = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
        if problems != ["ok"]:
            raise CopyError(f"{path} is damaged: {'; '.join(problems)}. Restore a copy of it.")
        version_table = connection.execute(
            "SELECT name FROM sqlite_master WHERE name='alembic_version'"
        )
        if version_table.fetchone() is None:
            raise CopyError(f"{path} is no database of MalleTrain.")
        if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise CopyError(f"{path} has rows that belong to nothing. Restore a copy of it.")
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
