"""Answers the lines of batches, a window of them at a time, and continues after a restart.

A line is a request of its user like any other, so the policy decides between lines and the requests
of clients that wait. A line that a limit refuses is submitted again after the time in the refusal.
The batches of a user are cancelled when all keys of the user are revoked.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from llmserve.batch_lines import response_line
from llmserve.gateway.access import Access, Caller
from llmserve.gateway.admission import REVOKED_CHECK_S, Admission, OpenRequest
from llmserve.gateway.database import (
    CANCELLING,
    GatewayDatabase,
    LineAnswer,
    OpenLine,
    StoredBatch,
)
from llmserve.gateway.models import read_order
from llmserve.gateway.responses import answer_body
from llmserve.openai_messages import ApiRefusal
from llmserve.oversize import BatchQueue

log = logging.getLogger(__name__)

WINDOW = 256
"""Maximum number of open requests of one batch."""
SAVE_S = 0.2
"""Seconds for which answers are collected before they are stored together."""
RETRY_S = 5.0
"""Seconds after which the database is tried again."""
NO_ANSWER = ("gateway_stops", "cancelled")
"""Codes of refusals that are due to the gateway."""

T = TypeVar("T")


class BatchRunner:
    """The open batches of a gateway.

    Args:
        database: with files and batches.
        admission: the open requests.
        access: checks the keys of users.
        window: maximum number of open requests of one batch.
    """

    def __init__(
        self,
        database: GatewayDatabase,
        admission: Admission,
        access: Access,
        window: int = WINDOW,
    ) -> None:
        self._database, self._admission, self._window = database, admission, window
        self._access = access
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._users: dict[str, str] = {}
        """Open batch → its user."""
        self._backlog: Counter[str] = Counter()

    def backlog(self, model: str) -> int:
        """Return the number of lines for a model that are not submitted yet."""
        return self._backlog[model]

    async def run(self) -> None:
        """Resume the batches in the database, and answer new ones until it is cancelled."""
        try:
            for batch in await asyncio.to_thread(self._database.open_batches):
                self.begin(batch)
            while True:
                await self._cancel_revoked()
                await asyncio.sleep(REVOKED_CHECK_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, batch: StoredBatch) -> None:
        """Answer the lines of a batch that have no answer."""
        event = self._cancelled[batch.id] = asyncio.Event()
        self._users[batch.id] = batch.user
        if batch.status == CANCELLING:
            event.set()
        work = _BatchWork(
            self._database, self._admission, batch, event, self._window, self._backlog
        )
        task = self._tasks[batch.id] = asyncio.create_task(work.run())

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.pop(batch.id, None)
            self._cancelled.pop(batch.id, None)
            self._users.pop(batch.id, None)

        task.add_done_callback(ended)

    def cancel(self, batch_id: str) -> None:
        """Give up the lines of a batch that have no answer. No effect if it has ended."""
        event = self._cancelled.get(batch_id)
        if event is not None:
            event.set()

    async def _cancel_revoked(self) -> None:
        """Cancel the batches of users whose keys are all revoked."""
        revoked = {user for user in set(self._users.values()) if self._access.is_shut_out(user)}
        for name, user in list(self._users.items()):
            event = self._cancelled.get(name)
            if user not in revoked or event is None or event.is_set():
                continue
            try:
                await asyncio.to_thread(self._database.begin_cancel, user, name)
            except Exception as error:  # a full disk, a server that is restarted: again later
                log.warning("Batch %s: the database fails: %s", name, error)
                continue
            log.info("Batch %s is cancelled: all keys of its user %s are revoked.", name, user)
            event.set()


class _BatchWork:
    """One batch."""

    def __init__(
        self,
        database: GatewayDatabase,
        admission: Admission,
        batch: StoredBatch,
        cancelled: asyncio.Event,
        window: int,
        backlog: Counter[str],
    ) -> None:
        self._database, self._admission, self._backlog = database, admission, backlog
        self._batch, self._cancelled, self._window = batch, cancelled, window
        self._caller = Caller(batch.user, "", batch.application)
        self._answers: deque[LineAnswer] = deque()
        self._is_interrupted = False
        """Whether the gateway is stopping. Its next process continues the batch."""

    async def run(self) -> None:
        saver = asyncio.create_task(self._save_often())
        lines: BatchQueue[OpenLine] = BatchQueue(())
        try:
            stored = await self._stored(lambda: self._database.open_lines(self._batch.id))
            lines = BatchQueue(stored)
            self._backlog.update(line.model for line in lines)
            workers = [
                asyncio.create_task(self._answer_each(lines))
                for _ in range(min(self._window, len(lines)))
            ]
            if workers:
                await self._until_done_or_cancelled(workers)
        finally:
            self._backlog.subtract(line.model for line in lines)
            saver.cancel()
            await asyncio.gather(saver, return_exceptions=True)
        await self._save()
        if not self._is_interrupted:
            await self._stored(lambda: self._database.end_batch(self._batch.id))

    async def _until_done_or_cancelled(self, workers: list[asyncio.Task[None]]) -> None:
        done = asyncio.ensure_future(asyncio.gather(*workers))
        cancel = asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait((done, cancel), return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                done.result()
        finally:
            for task in (*workers, cancel):
                task.cancel()
            await asyncio.gather(done, cancel, *workers, return_exceptions=True)

    async def _answer_each(self, lines: BatchQueue[OpenLine]) -> None:
        while lines:
            line = lines.take()
            self._backlog[line.model] -= 1
            try:
                answer = await self._answer(line, lines)
                if answer is None:
                    self._backlog[line.model] += 1
                    continue
                status, body = 200, answer
            except ApiRefusal as refusal:
                if refusal.code in NO_ANSWER:
                    self._is_interrupted = True
                    return
                status, body = refusal.status, refusal.body()
            text = msgspec.json.encode(
                response_line(uuid.uuid4().hex, line.custom_id, status, body)
            )
            self._answers.append(LineAnswer(self._batch.id, line.number, text, status != 200))

    async def _answer(
        self, line: OpenLine, lines: BatchQueue[OpenLine]
    ) -> dict[str, object] | None:
        """Return the body of an answer; None: the line was moved behind the others."""
        gateway_order = read_order(
            line.body, self._batch.endpoint, self._admission.models, may_wait=True
        )
        largest_tokens = gateway_order.model.dispatcher.largest_tokens
        if lines.defer(line, gateway_order.order.tokens, largest_tokens):
            return None
        while True:
            try:
                opened = await self._admission.admit(gateway_order, self._caller)
                break
            except ApiRefusal as refusal:
                if refusal.retry_after_s is None:
                    raise
                await asyncio.sleep(refusal.retry_after_s)
        return await _answer_of(opened)

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _save(self) -> None:
        answers = list(self._answers)
        if answers:
            await self._stored(lambda: self._database.add_answers(answers))
            for _ in answers:
                self._answers.popleft()

    async def _stored(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which uses the database. Repeats it until it succeeds."""
        while True:
            task = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.gather(task, return_exceptions=True)
                raise
            except Exception as error:  # a full disk, a server that is restarted
                log.warning("Batch %s: the database fails: %s", self._batch.id, error)
                await asyncio.sleep(RETRY_S)


async def _answer_of(opened: OpenRequest) -> dict[str, object]:
    """Return the body of an answer. If the waiting task is cancelled, so is the request."""
    try:
        return await answer_body(opened)
    finally:
        opened.stream.cancel()
