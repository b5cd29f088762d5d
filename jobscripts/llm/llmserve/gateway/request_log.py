"""The log of answered requests in the gateway's database, from which ``llmserve trace`` makes
traces: times, users and lengths. Texts are not stored; the hashes of a prompt's blocks show which
prompts have a common beginning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterator

from sqlalchemy import (
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    delete,
    insert,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from llmserve.answers import AnswerResult
from llmserve.gateway.admission import OpenRequest
from llmserve.gateway.database import open_engine
from llmserve.states import RequestState
from llmserve.trace_files import block_hashes
from llmserve.traces import MOONCAKE_BLOCK, TraceRequest

log = logging.getLogger(__name__)

SAVE_S = 1.0
"""Seconds for which requests are collected before they are stored together."""
DELETE_S = 3600.0
"""Seconds between two deletions of old requests."""
DAY_S = 86_400.0
MAX_PENDING = 100_000
"""Maximum number of requests that are kept in memory while the database fails; the oldest are
dropped.
"""

metadata = MetaData()
requests = Table(
    "requests",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("arrived", Float(53), nullable=False),
    Column("model", String(255), nullable=False),
    Column("user", String(64), nullable=False),
    Column("application", String(64), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("blocks", LargeBinary, nullable=False),
    Index("ix_requests_arrived", "arrived"),
)


class RequestLog:
    """The answered requests of a gateway.

    Args:
        url: SQLAlchemy URL of its database.
        keep_days: days for which requests are kept.
        clock: seconds since the epoch.

    Raises:
        DatabaseError: the database cannot be used.
    """

    def __init__(self, url: str, keep_days: float, clock: Callable[[], float] = time.time) -> None:
        self._engine = open_engine(url, metadata)
        self._keep_s, self._clock = keep_days * DAY_S, clock
        self._pending: list[dict[str, object]] = []
        self._deleted_at = 0.0

    def close(self) -> None:
        """Store the remaining requests, and close all connections."""
        try:
            self.save()
        finally:
            self._engine.dispose()

    def observe(self, opened: OpenRequest, result: AnswerResult) -> None:
        """Record a request that has ended, if it was answered."""
        if result.state is not RequestState.DONE:
            return
        order = opened.gateway_order.order
        hashes = array("Q", block_hashes(order.prompt))
        self._pending.append(
            {
                "arrived": self._clock() - (result.ended_at - result.submitted_at),
                "model": opened.model.name,
                "user": opened.caller.user,
                "application": opened.caller.application,
                "prompt_tokens": len(order.prompt),
                "output_tokens": len(result.ids),
                "blocks": hashes.tobytes(),
            }
        )
        del self._pending[:-MAX_PENDING]

    async def run(self) -> None:
        """Store requests until it is cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            if self._pending:
                await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Store the requests that are not stored yet, and delete old ones."""
        rows, now = list(self._pending), self._clock()
        try:
            with self._engine.begin() as connection:
                if rows:
                    connection.execute(insert(requests), rows)
                if now - self._deleted_at >= DELETE_S:
                    oldest = now - self._keep_s
                    connection.execute(delete(requests).where(requests.c.arrived < oldest))
                    self._deleted_at = now
        except SQLAlchemyError as error:
            log.warning("The log of requests cannot be stored, and will be tried again: %s", error)
            return
        del self._pending[: len(rows)]

    def read(
        self, since: float = 0.0, until: float = float("inf"), model: str = ""
    ) -> Iterator[tuple[float, TraceRequest]]:
        """Yield requests in the order of arrival, each with its time of arrival.

        Args:
            since: first time, seconds since the epoch.
            until: time after the last one.
            model: name of a model; empty: all.
        """
        query = (
            select(requests)
            .where(requests.c.arrived >= since)
            .order_by(requests.c.arrived, requests.c.number)
        )
        if until != float("inf"):
            query = query.where(requests.c.arrived < until)
        if model:
            query = query.where(requests.c.model == model)
        start: float | None = None
        with self._engine.connect() as connection:
            for row in connection.execution_options(yield_per=1000).execute(query):
                start = row.arrived if start is None else start
                blocks = array("Q")
                blocks.frombytes(row.blocks)
                yield (
                    row.arrived,
                    TraceRequest(
                        row.arrived - start,
                        row.prompt_tokens,
                        row.output_tokens,
                        row.user,
                        tuple(blocks),
                        MOONCAKE_BLOCK,
                    ),
                )
