"""The logs of the daemon.

The audit log (:class:`AuditLog`): every decision and every change is one event, which is stored,
logged, and sent to the clients that wait for events.

The daemon's own log: decides format and level. Lines go to standard error, or to a file that is
rotated by size, for people (``text``) or for a log collector (``json``, one object a line). A
logger is bound once to its subject, ``structlog.get_logger(job="j3")``, and each of its lines
carries that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import structlog

from malletrain.daemon.site.clock import Clock
from malletrain.identity.state_directory import written_in_vain
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView
from malletrain.store.records import EventRow
from malletrain.store.store import Store
from malletrain.waits import happens

log = structlog.get_logger(__name__)


class AuditLog:
    """Writes events and wakes the clients that follow them."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._news = asyncio.Event()
        self._start = self._newest()
        """Number of the newest event from before this daemon's start."""

    def record(
        self,
        kind: EventKind,
        sentence: str,
        *,
        job: str = "",
        node: str = "",
        lease: str = "",
        generation: int | None = None,
        **data: Any,
    ) -> None:
        """Append one event.

        Args:
            kind: kind of the event.
            sentence: description for users.
            job: id of the job; empty if the event is not about a job.
            node: name of the node; empty if the event is not about a node.
            lease: id of the lease; empty if the event is not about a lease.
            generation: number of the round; None if the event is not about a round.
            data: values for programs.
        """
        row = EventRow(
            self._clock.now(), kind, job, node, lease, generation, {"sentence": sentence, **data}
        )
        self._store.add_event(row)
        bound = {
            k: v
            for k, v in (("job", job), ("node", node), ("lease", lease), ("generation", generation))
            if v
        }
        log.info(f"{kind}: {sentence}", **bound)
        self._news.set()
        self._news = asyncio.Event()

    def since(self, seq: int, limit: int, job: str | None) -> list[EventView]:
        """Return the stored events after an event number. A number that no event has yet is from a
        log that was replaced by an older one, as by a restore of the database: the events since
        the daemon's start are returned, so that a client that follows goes on.

        Args:
            seq: number of the event; a negative number selects the last ``-seq`` events.
            limit: maximum number of events.
            job: id of the job to which the events are limited; None for all events.
        """
        if seq < 0:
            return [_view(row) for row in self._store.last_events(min(limit, -seq), job=job)]
        rows = self._store.events_since(seq, limit, job=job)
        if not rows and seq > self._newest():
            rows = self._store.events_since(self._start, limit, job=job)
        return [_view(row) for row in rows]

    def _newest(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return next((row.seq for row in self._store.last_events(1)), 0)

    async def news(self, wait_s: float) -> None:
        """Return at the next event, or after ``wait_s``."""
        await happens(self._news, wait_s)


def _view(row: EventRow) -> EventView:
    data = dict(row.data)
    sentence = str(data.pop("sentence", ""))
    if row.generation is not None:
        data["generation"] = row.generation
    return EventView(row.seq, row.time, row.kind, row.job, row.node, row.lease, sentence, data)


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_FIRST_FIELDS = ("job", "node", "lease")
"""Fields that come first in a line of text."""


MAX_OLD_FILES = 4
"""Number of older log files that are kept."""


class RotatedLog:
    """A log file that is rotated before it exceeds ``limit`` bytes. Lines that cannot be written,
    for example because the disk is full, go to standard error.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._handler = _Rotating(path, maxBytes=limit, backupCount=MAX_OLD_FILES, encoding="utf-8")
        self._handler.terminator = ""

    def write(self, text: str) -> None:
        """Write lines that belong together."""
        self._handler.handle(logging.makeLogRecord({"msg": text}))

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""

    def close(self) -> None:
        """Close the file. A later write opens it again."""
        with contextlib.suppress(OSError):  # buffered lines have gone to standard error
            self._handler.close()


class _Rotating(RotatingFileHandler):
    """Reports once why lines cannot be written, until a line is written again."""

    _failures = 0
    """Number of consecutive lines that could not be written."""

    def emit(self, record: logging.LogRecord) -> None:
        before = self._failures
        super().emit(record)
        if self._failures == before:
            self._failures = 0

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        self._failures += 1
        if self._failures == 1 and isinstance(error, OSError):
            sys.stderr.write(
                f"malletraind: The log file {self.baseFilename} cannot be written: "
                f"{written_in_vain(error)} Its lines go here meanwhile.\n"
            )
        sys.stderr.write(record.getMessage())
        if self.stream is not None:  # drop the buffered lines, else they are written again
            stream, self.stream = self.stream, None
            with contextlib.suppress(OSError):
                stream.close()


def configure(
    level: str = "info", fmt: str = "text", to: RotatedLog | TextIO | None = None
) -> None:
    """Set up logging of this process. Libraries' logs go to the same place.

    Args:
        level: minimum level, one of LEVELS.
        fmt: format of the lines, one of FORMATS.
        to: file of the log; None for standard error.

    Raises:
        ValueError: ``level`` or ``fmt`` is unknown.

    """
    stream: Any = to or sys.stderr
    if level not in LEVELS or fmt not in FORMATS:
        raise ValueError(
            f"Log level is one of {', '.join(LEVELS)} and format one of {', '.join(FORMATS)}; "
            f"given {level}, {fmt}."
        )
    number = logging.getLevelName(level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=fmt == "json"),
    ]
    if fmt == "json":
        # Not dict_tracebacks: it shows local variables, and the secrets among them.
        final_processors: list[Any] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        final_processors = [structlog.processors.format_exc_info, _as_text]
    structlog.configure(
        processors=[*shared, *final_processors],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *final_processors,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # Other libraries log every step of a start at level info.
    for library in ("alembic", "asyncio", "sqlalchemy"):
        logging.getLogger(library).setLevel(max(number, logging.WARNING))


def _as_text(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> str:
    """Return the line ``2026-02-10T08:52:01.123 warning  node lost  job=j3 node=n07
    notice=false``.
    """
    time, level, message = (
        entry.pop("timestamp", ""),
        entry.pop("level", ""),
        entry.pop("event", ""),
    )
    trace = entry.pop("exception", None)
    names = [name for name in _FIRST_FIELDS if name in entry] + sorted(
        entry.keys() - set(_FIRST_FIELDS)
    )
    pairs = " ".join(f"{name}={_show(entry[name])}" for name in names)
    line = f"{time[:23]} {level:<7} {message}" + (f"  {pairs}" if pairs else "")
    return f"{line}\n{trace}" if trace else line


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and " " not in text and "=" not in text and text
    return text if plain else repr(text)
