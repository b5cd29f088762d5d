"""Files and batches in a database, so that a restart of the gateway loses none of them.

A batch is stored as its lines: each has a body and, when it is answered, an answer. The output file
and the error file of a batch are made from the lines when the batch ends. Methods block for the
disk; the gateway calls them in a thread.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from llmserve.batch_lines import BatchLine
from llmserve.gateway.errors import GatewayError

metadata = MetaData()
files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("user", String(64), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("created", Float(53), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),
)
batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("user", String(64), nullable=False, index=True),
    Column("application", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file", String(64), nullable=False),
    Column("output_file", String(64)),
    Column("error_file", String(64)),
    Column("window", String(32), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("metadata", Text, nullable=False),
    Column("created", Float(53), nullable=False),
    Column("cancelling", Float(53)),
    Column("ended", Float(53)),
    Column("total", Integer, nullable=False),
)
lines = Table(
    "lines",
    metadata,
    Column("batch", String(64), ForeignKey("batches.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("model", String(255), nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("answer", LargeBinary),
    Column("failed", Integer, nullable=False, server_default="0"),
    Index("ix_lines_open", "batch", "number", sqlite_where=Column("answer").is_(None)),
)

IN_PROGRESS, CANCELLING, COMPLETED, CANCELLED = (
    *("in_progress", "cancelling"),
    *("completed", "cancelled"),
)
OPEN = (IN_PROGRESS, CANCELLING)
"""States of batches that have not ended."""


class DatabaseError(GatewayError):
    """The database cannot be used; the message is a sentence."""


def open_engine(url: str, tables: MetaData) -> Engine:
    """Open a database, and create missing tables.

    Args:
        url: SQLAlchemy URL. A missing SQLite file is created, readable by its owner only.
        tables: the tables.

    Raises:
        DatabaseError: it cannot be used.
    """
    try:
        location = make_url(url)
        is_sqlite = location.get_backend_name() == "sqlite"
        if is_sqlite and location.database:
            os.close(os.open(location.database, os.O_RDWR | os.O_CREAT, 0o600))
        engine = create_engine(location)
        if is_sqlite:
            event.listen(engine, "connect", _set_up_sqlite)
        tables.create_all(engine)
    except (SQLAlchemyError, OSError, ImportError) as error:
        raise DatabaseError(
            f"The database of the gateway cannot be used: {error}. Correct `database` in the "
            "configuration, or the permissions of the file."
        ) from None
    return engine


class StoredFile(msgspec.Struct, frozen=True):
    """A file without its content."""

    id: str
    user: str
    name: str
    purpose: str
    created: float
    bytes: int

    def view(self) -> dict[str, Any]:
        """Return it as in the OpenAI API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch, with the numbers of its lines."""

    id: str
    user: str
    application: str
    endpoint: str
    input_file: str
    output_file: str | None
    error_file: str | None
    window: str
    status: str
    metadata: dict[str, Any]
    created: float
    cancelling: float | None
    ended: float | None
    total: int
    completed: int
    failed: int

    def view(self) -> dict[str, Any]:
        """Return it as in the OpenAI API."""
        ended = None if self.ended is None else int(self.ended)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None,
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": int(self.created),
            "in_progress_at": int(self.created),
            "expires_at": None,
            "finalizing_at": ended,
            "completed_at": ended if self.status == COMPLETED else None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None if self.cancelling is None else int(self.cancelling),
            "cancelled_at": ended if self.status == CANCELLED else None,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


@dataclass(frozen=True)
class OpenLine:
    """A line without an answer."""

    number: int
    custom_id: str
    body: bytes
    model: str


@dataclass(frozen=True)
class LineAnswer:
    """The result of a line."""

    batch: str
    number: int
    answer: bytes
    """Line of the output file, or of the error file."""
    failed: bool


class GatewayDatabase:
    """The files and batches of a gateway.

    Args:
        url: SQLAlchemy URL. A missing SQLite file is created, readable by its owner only.

    Raises:
        DatabaseError: it cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url, metadata)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # --- files ---

    def add_file(self, user: str, name: str, purpose: str, content: bytes) -> StoredFile:
        """Store a file; return it."""
        with self._engine.begin() as connection:
            return _add_file(connection, user, name, purpose, content)

    def file(self, user: str, file_id: str) -> StoredFile | None:
        """Return a file of a user; None if there is none."""
        query = select(*_FILE).where(files.c.id == file_id, files.c.user == user)
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        return None if row is None else StoredFile(*row)

    def files(self, user: str) -> list[StoredFile]:
        """Return the files of a user, the newest first."""
        query = select(*_FILE).where(files.c.user == user).order_by(files.c.created.desc())
        with self._engine.connect() as connection:
            return [StoredFile(*row) for row in connection.execute(query)]

    def content(self, user: str, file_id: str) -> bytes | None:
        """Return the content of a file of a user; None if there is none."""
        query = select(files.c.content).where(files.c.id == file_id, files.c.user == user)
        with self._engine.connect() as connection:
            content = connection.execute(query).scalar()
        return None if content is None else bytes(content)

    def delete_file(self, user: str, file_id: str) -> bool:
        """Delete a file of a user; return whether there was one. Batches keep their lines."""
        statement = delete(files).where(files.c.id == file_id, files.c.user == user)
        with self._engine.begin() as connection:
            return bool(connection.execute(statement).rowcount)

    # --- batches ---

    def add_batch(
        self,
        user: str,
        application: str,
        endpoint: str,
        input_file: str,
        window: str,
        requests: Sequence[BatchLine],
        more: dict[str, Any],
    ) -> StoredBatch:
        """Store a batch with its lines; return it.

        Args:
            user: whose it is.
            application: application of all requests of the batch; empty: none.
            endpoint: path of its requests.
            input_file: id of the file that it was read from.
            window: completion window, as the client said.
            requests: at least one.
            more: metadata of the client.
        """
        name = f"batch_{uuid.uuid4().hex}"
        with self._engine.begin() as connection:
            connection.execute(
                insert(batches).values(
                    id=name,
                    user=user,
                    application=application,
                    endpoint=endpoint,
                    input_file=input_file,
                    window=window,
                    status=IN_PROGRESS,
                    metadata=msgspec.json.encode(more).decode(),
                    created=time.time(),
                    total=len(requests),
                )
            )
            connection.execute(
                insert(lines),
                [
                    {
                        "batch": name,
                        "number": n,
                        "custom_id": line.custom_id,
                        "model": line.model,
                        "body": line.body,
                    }
                    for n, line in enumerate(requests)
                ],
            )
        batch = self.batch(user, name)
        assert batch is not None
        return batch

    def batch(self, user: str, batch_id: str) -> StoredBatch | None:
        """Return a batch of a user; None if there is none."""
        return next(iter(self._batches(batches.c.id == batch_id, batches.c.user == user)), None)

    def batches(self, user: str) -> list[StoredBatch]:
        """Return the batches of a user, the newest first."""
        return self._batches(batches.c.user == user)

    def newest_batches(self, limit: int, user: str = "") -> list[StoredBatch]:
        """Return the newest batches, the newest first.

        Args:
            limit: maximum number of them.
            user: whose they are; empty: of all users.
        """
        return self._batches(*([batches.c.user == user] if user else []), limit=limit)

    def open_batches(self) -> list[StoredBatch]:
        """Return the batches of all users that have not ended, the oldest first."""
        return self._batches(batches.c.status.in_(OPEN))[::-1]

    def open_lines(self, batch_id: str) -> list[OpenLine]:
        """Return the lines of a batch that have no answer, in order."""
        query = (
            select(lines.c.number, lines.c.custom_id, lines.c.body, lines.c.model)
            .where(lines.c.batch == batch_id, lines.c.answer.is_(None))
            .order_by(lines.c.number)
        )
        with self._engine.connect() as connection:
            return [
                OpenLine(row[0], row[1], bytes(row[2]), row[3]) for row in connection.execute(query)
            ]

    def add_answers(self, answers: Iterable[LineAnswer]) -> None:
        """Store answers, all or none. A line that has one keeps it."""
        with self._engine.begin() as connection:
            for answer in answers:
                connection.execute(
                    update(lines)
                    .where(
                        lines.c.batch == answer.batch,
                        lines.c.number == answer.number,
                        lines.c.answer.is_(None),
                    )
                    .values(answer=answer.answer, failed=int(answer.failed))
                )

    def begin_cancel(self, user: str, batch_id: str) -> StoredBatch | None:
        """Note that a batch is to be cancelled, if it has not ended; return it. None if there is
        none.
        """
        with self._engine.begin() as connection:
            connection.execute(
                update(batches)
                .where(
                    batches.c.id == batch_id,
                    batches.c.user == user,
                    batches.c.status == IN_PROGRESS,
                )
                .values(status=CANCELLING, cancelling=time.time())
            )
        return self.batch(user, batch_id)

    def end_batch(self, batch_id: str) -> None:
        """End a batch in which no further line will be answered: make its files from the existing
        answers. No effect if it has ended.
        """
        query = (
            select(lines.c.answer, lines.c.failed)
            .where(lines.c.batch == batch_id, lines.c.answer.is_not(None))
            .order_by(lines.c.number)
        )
        with self._engine.begin() as connection:
            row = connection.execute(
                select(batches.c.user, batches.c.status).where(
                    batches.c.id == batch_id, batches.c.status.in_(OPEN)
                )
            ).first()
            if row is None:
                return
            parts: dict[bool, list[bytes]] = {False: [], True: []}
            for answer, failed in connection.execute(query):
                parts[bool(failed)].append(bytes(answer) + b"\n")
            file_of: dict[bool, str | None] = {}
            for failed, name in ((False, "output"), (True, "error")):
                content = b"".join(parts[failed])
                file_name = f"{batch_id}_{name}.jsonl"
                file_of[failed] = (
                    _add_file(connection, row.user, file_name, "batch_output", content).id
                    if content
                    else None
                )
            status = CANCELLED if row.status == CANCELLING else COMPLETED
            connection.execute(
                update(batches)
                .where(batches.c.id == batch_id)
                .values(
                    status=status,
                    ended=time.time(),
                    output_file=file_of[False],
                    error_file=file_of[True],
                )
            )

    def _batches(self, *conditions: Any, limit: int | None = None) -> list[StoredBatch]:
        of_batch = lines.c.batch == batches.c.id
        answered = select(func.count(lines.c.answer)).where(of_batch).scalar_subquery()
        failed = select(func.sum(lines.c.failed)).where(of_batch).scalar_subquery()
        query = (
            select(batches, answered.label("answered"), failed.label("failed"))
            .where(*conditions)
            .order_by(batches.c.created.desc())
            .limit(limit)
        )
        with self._engine.connect() as connection:
            return [_batch(dict(row)) for row in connection.execute(query).mappings()]


_FILE = [files.c[name] for name in StoredFile.__struct_fields__]


def _batch(values: dict[str, Any]) -> StoredBatch:
    answered, failed = values.pop("answered"), int(values.pop("failed"))
    values["metadata"] = msgspec.json.decode(values["metadata"])
    return StoredBatch(**values, completed=answered - failed, failed=failed)


def _add_file(connection: Any, user: str, name: str, purpose: str, content: bytes) -> StoredFile:
    file = StoredFile(f"file-{uuid.uuid4().hex}", user, name, purpose, time.time(), len(content))
    connection.execute(insert(files).values(**msgspec.structs.asdict(file), content=content))
    return file


def _set_up_sqlite(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA busy_timeout = 10000")
    cursor.close()
