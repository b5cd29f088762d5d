"""Copies of an SQLite database that is in use, checked before they count; and what is in it, for
other programs.

Decides what a good copy is. Runs on the head node, in processes of their own: the daemon takes no
part. A copy is made by SQLite's online backup, which sees one moment whatever is written meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy.engine import make_url

from malletrain.store.migrations import versions
from malletrain.store.schema import HEAD, metadata

BUSY_S = 30.0
EXPORTED = ("jobs", "leases", "events")
SIDE_FILES = ("-wal", "-shm")


LEAP = 1_000
"""Numbers of leases left out after a restore: those younger than the copy have theirs still."""


class CopyError(RuntimeError):
    """It cannot be done; the message is a sentence for the operator."""


def backup(url: str, target: Path) -> int:
    """Copy the database at ``url`` to ``target``; returns its bytes. Raises CopyError."""
    source = _file_of(url)
    if target.exists():
        raise CopyError(f"{target} is there already; give a name that is not.")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.close(handle)
        with _opened(source) as from_, _opened(part) as to:
            from_.backup(to)
            # The copy is one file; whoever restores it has no other.
            to.execute("PRAGMA journal_mode=DELETE")
        _whole(part)
        _on_disk(part)
        os.link(part, target)
        return target.stat().st_size
    except OSError as error:
        raise CopyError(f"{target} cannot be written: {error.strerror}.") from None
    finally:
        for path in (part, *(Path(f"{part}{side}") for side in SIDE_FILES)):
            path.unlink(missing_ok=True)


def restore(url: str, copy: Path) -> Path | None:
    """Put ``copy`` in the place of the database at ``url``, which nobody uses. Returns where what
    was there is kept, if there was something. Raises CopyError.
    """
    target = _file_of(url, must_be=False)
    version = _whole(copy)
    if version not in versions():
        raise CopyError(
            f"{copy} was written by a later malletrain (schema {version}); restore it with that."
        )
    backup = None
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with _opened(copy) as from_, _opened(part) as to:
            from_.backup(to)
            to.execute(
                "INSERT INTO meta (key, value) VALUES ('last_lease', ?1) "
                "ON CONFLICT (key) DO UPDATE SET value = CAST(value + ?1 AS TEXT)",
                (LEAP,),
            )
            to.commit()
        _on_disk(part)
        if target.exists():
            backup = target.with_name(f"{target.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
            _back_up(target, backup)
        for side in SIDE_FILES:
            Path(f"{target}{side}").unlink(missing_ok=True)
        os.replace(part, target)
        _on_disk(target.parent)
    except OSError as error:
        raise CopyError(f"{target} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)
    return backup


def _back_up(target: Path, backup: Path) -> None:
    """Give a database another name, too. What is in its log becomes part of it; of one that is too
    damaged for that the log is kept beside it.
    """
    try:
        with _opened(target) as old:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except CopyError:
        for side in SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.link(f"{target}{side}", f"{backup}{side}")
    os.link(target, backup)


def vacuum(url: str) -> tuple[int, int]:
    """Give the room of what was deleted back to the file system; nobody may use the database at
    ``url``. Returns its bytes before and after. Raises CopyError.
    """
    path = _file_of(url)
    _whole(path)
    with _opened(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = path.stat().st_size
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return before, path.stat().st_size


def check(url: str) -> str:
    """What the database at ``url`` is, as a sentence. Raises CopyError where it is not whole."""
    path = _file_of(url)
    version = _whole(path)
    with _opened(path) as connection:
        counts = [
            f"{connection.execute(f'SELECT count(*) FROM {name}').fetchone()[0]:,} {name}"
            for name in EXPORTED
        ]
    newest = "" if version == HEAD else f"; this malletrain will migrate it to {HEAD}"
    if version not in versions():
        newest = "; it was written by a later malletrain: run that version"
    return f"{path} is whole: {', '.join(counts)}; schema {version}{newest}."


def export(url: str, out: TextIO) -> None:
    """Write all rows of jobs, leases and events to ``out``, as JSON, one a line. Raises
    CopyError.
    """
    with _opened(_file_of(url)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")  # all of one moment
        for name in EXPORTED:
            table = metadata.tables[name]
            key = ", ".join(column.name for column in table.primary_key)
            for row in connection.execute(f"SELECT * FROM {name} ORDER BY {key}"):
                fields = {column: _value(row[column]) for column in row.keys()}  # noqa: SIM118
                out.write(json.dumps({"table": name, **fields}) + "\n")


def _value(value: Any) -> Any:
    """A column as data; columns of JSON are text in SQLite."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _file_of(url: str, must_be: bool = True) -> Path:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        shown = parsed.render_as_string(hide_password=True)
        raise CopyError(f"{shown} is no SQLite file; use the tools of that database (pg_dump).")
    path = Path(parsed.database)
    if must_be and not path.exists():
        raise CopyError(f"There is no database at {path}; has the daemon run with this file?")
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CopyError(f"{path} cannot be used as a database: {error}.") from None


def _whole(path: Path) -> str:
    """The version of the schema of a database that is whole. Raises CopyError."""
    with _opened(path) as connection:
        problems = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
        if problems != ["ok"]:
            raise CopyError(f"{path} is damaged: {'; '.join(problems)}. Restore a copy of it.")
        there = connection.execute("SELECT name FROM sqlite_master WHERE name='alembic_version'")
        if there.fetchone() is None:
            raise CopyError(f"{path} is no database of MalleTrain.")
        if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise CopyError(f"{path} has rows that belong to nothing. Restore a copy of it.")
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def _on_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
