"""The dispatching member of a batch: submits requests without an answer, saves answers, and writes
the output at the end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from llmserve.answers import AnswerResult, AnswerStream
from llmserve.batch_input import BatchInput, answer_name, error_line, name_of
from llmserve.batch_lines import BatchLine, response_line
from llmserve.batch_store import BatchFolder, BatchRecord, Epoch, Manifest
from llmserve.client_bodies import ClientOrder
from llmserve.live_dispatcher import LiveDispatcher
from llmserve.openai_messages import AnswerShape, ApiRefusal, GenerationOrder
from llmserve.oversize import BatchQueue
from llmserve.service_members import ReplicaFollower, ServiceMember
from llmserve.states import RequestState
from malletrain import membership
from malletrain.waits import happens

FLUSH_S = 0.25
"""Seconds between two writes of answers."""
SAVE_S = 5.0
"""Seconds between two writes of the ids of answers that are not complete."""
STATUS_S = 1.0
MIN_WINDOW = 32
"""Minimum number of submitted requests, so that a replica has work as soon as it is ready."""
VALUES_S = 10.0
"""Seconds between two reports of what nodes are worth."""


class BatchLeader:
    """Dispatches one batch for one epoch.

    Args:
        folder: folder of the batch.
        epoch: the epoch that this process has claimed.
        manifest: manifest of the batch.
        requests: the input.
        live: the dispatcher; its replicas follow the members.
        group: the members.
        worth: value of a node while there is work for it, samples/s; 0: it is not reported.
        max_nodes: maximum number of nodes of the job.
    """

    def __init__(
        self,
        folder: BatchFolder,
        epoch: Epoch,
        manifest: Manifest,
        requests: BatchInput,
        live: LiveDispatcher,
        group: membership.Membership,
        worth: float = 0.0,
        max_nodes: int = 1,
    ) -> None:
        self._folder, self._epoch, self._manifest = folder, epoch, manifest
        self._requests, self._live, self._group = requests, live, group
        self._worth, self._max_nodes = worth, max_nodes
        self._records: list[BatchRecord] = []
        """Records that are not written yet."""
        self._running: dict[int, AnswerStream] = {}
        self._saved: dict[int, int] = {}
        """Index of a running request → number of its ids on disk."""
        self._room = asyncio.Event()
        """Set when a request has ended."""
        self._answered = self._failed = 0
        self._resumed_tokens = 0
        """Number of ids from earlier epochs."""
        self._follower = ReplicaFollower(live)
        self._ended_before = 0
        """Number of requests that had ended before this epoch."""
        self._useful = 0
        """Number of nodes with work in the last report."""
        self._saved_at = self._status_at = self._values_at = -math.inf
        """Times of the last write or report of ids, status and values, seconds."""
        self._started = time.monotonic()

    async def run(self, has_resigned: Callable[[], bool]) -> bool:
        """Dispatch until all requests have ended and the output is written. Return whether the
        output exists; if not, another process dispatches or is about to.

        Args:
            has_resigned: returns whether another member is to take over.

        Raises:
            OSError: the folder cannot be written.
            BatchFolderError: the segments lack an answer.
        """
        progress = await asyncio.to_thread(self._folder.progress)
        self._answered, self._failed = len(progress.answered), len(progress.failed)
        ended = progress.answered | progress.failed
        self._ended_before = len(ended)
        waiting = [index for index in range(len(self._requests)) if index not in ended]
        feeder = asyncio.create_task(self._feed(waiting, progress.generated))
        try:
            while True:
                self._follow_members()
                self._tell_worth(len(waiting))
                is_complete = feeder.done() and not self._running
                if feeder.done():
                    feeder.result()
                must_leave = has_resigned()
                if not await self._write(is_last=is_complete or must_leave):
                    return False
                if is_complete:
                    break
                if must_leave:
                    return False
                await asyncio.sleep(FLUSH_S)
        except asyncio.CancelledError:
            # The process is about to end. Ids that are written now need not be generated again.
            self._folder.append(self._epoch, [*self._records, *self._partial()[0]])
            raise
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
        answers, errors = await asyncio.to_thread(self._folder.merge, len(self._requests))
        status = {**self._status(), "answered": answers, "failed": errors}
        self._folder.write_status(status)
        self._folder.finish({"answered": answers, "failed": errors})
        return True

    # --- requests ---

    async def _feed(self, waiting: list[int], generated: dict[int, list[int]]) -> None:
        """Submit requests, at most a window of them at a time."""
        while not self._live.largest_tokens:
            self._room.clear()
            await happens(self._room, FLUSH_S)
        queue = BatchQueue(waiting)
        while queue:
            await self._until_room()
            index = queue.take()
            self._submit(index, generated.get(index, []), queue)
            await asyncio.sleep(0)

    async def _until_room(self) -> None:
        while len(self._running) >= max(MIN_WINDOW, 2 * self._live.load.slots):
            self._room.clear()
            await happens(self._room, FLUSH_S)  # there may be more slots then

    def _submit(self, index: int, ids: list[int], queue: BatchQueue[int]) -> None:
        custom_id = self._requests.line(index).custom_id
        try:
            line, order = self._requests.order(index, (self._manifest.name,), self._live.tokenizer)
        except ApiRefusal as refusal:
            self._fail(index, custom_id, refusal.code, refusal.sentence)
            return
        request = order.request(f"line-{index}", "batch")
        if queue.defer(index, request.tokens, self._live.largest_tokens):
            return
        if order.continuable:
            self._resumed_tokens += len(ids)
            stream = self._live.submit(request, order.parameters, ids)
            self._saved[index] = len(ids)
        else:
            stream = self._live.submit_body(request, order.path, order.body)
        self._running[index] = stream
        stream.on_end(lambda result: self._end(index, line, order, result))

    def _end(self, index: int, line: BatchLine, order: ClientOrder, result: AnswerResult) -> None:
        del self._running[index]
        self._saved.pop(index, None)
        self._room.set()
        if result.state is RequestState.DONE:
            self._answered += 1
            body = result.body or self._body(line, order, result)
            answer = response_line(name_of(line.custom_id), line.custom_id, 200, body)
            text = msgspec.json.encode(answer)
            self._records.append(BatchRecord(index, answer=msgspec.Raw(text)))
        elif result.state is not RequestState.CANCELLED:
            code = result.refusal.limit if result.refusal is not None else "failed"
            self._fail(index, line.custom_id, code, result.sentence)

    def _fail(self, index: int, custom_id: str, code: str, sentence: str) -> None:
        self._failed += 1
        error = msgspec.json.encode(error_line(custom_id, code, sentence))
        self._records.append(BatchRecord(index, error=msgspec.Raw(error)))

    def _body(self, line: BatchLine, order: ClientOrder, result: AnswerResult) -> dict[str, Any]:
        shape = AnswerShape(
            answer_name(line.custom_id, is_chat=order.is_chat),
            self._manifest.created,
            self._manifest.name,
            GenerationOrder(
                order.prompt,
                order.max_tokens,
                stream=False,
                include_usage=False,
                return_token_ids=order.return_token_ids,
                is_chat=order.is_chat,
            ),
        )
        return shape.whole(result.text, list(result.ids), result.reason or "length")

    # --- the folder ---

    async def _write(self, *, is_last: bool) -> bool:
        """Write the new records. Return whether this epoch is current."""
        now = time.monotonic()
        ended, partial, saved = len(self._records), list[BatchRecord](), dict[int, int]()
        if is_last or now - self._saved_at >= SAVE_S:
            self._saved_at = now
            partial, saved = self._partial()
        if is_last or now - self._status_at >= STATUS_S:
            self._status_at = now
            await asyncio.to_thread(self._folder.write_status, self._status())
        records = [*self._records[:ended], *partial]
        is_current = await asyncio.to_thread(self._folder.append, self._epoch, records)
        # Only after the write: a task that is cancelled before writes them again, and a repeated
        # record changes nothing.
        del self._records[:ended]
        self._saved.update({index: n for index, n in saved.items() if index in self._saved})
        return is_current

    def _partial(self) -> tuple[list[BatchRecord], dict[int, int]]:
        """Return the ids since the last save, and the index of each request → the number of its ids
        on disk after this save.
        """
        records, saved = [], {}
        for index, count in self._saved.items():
            ids = self._live.generated(f"line-{index}")
            # After a loss a request may have fewer ids than were saved: they are saved again from
            # there.
            start = min(count, len(ids))
            if len(ids) != count:
                records.append(BatchRecord(index, start=start, ids=list(ids[start:])))
                saved[index] = len(ids)
        return records, saved

    def _status(self) -> dict[str, Any]:
        counts = self._live.counts()
        seconds = time.monotonic() - self._started
        return {
            "requests": len(self._requests),
            "answered": self._answered,
            "failed": self._failed,
            "running": counts.running,
            "epoch": self._epoch.number,
            "dispatcher": self._group.me.node,
            "generated_tokens": counts.generated_tokens,
            "repeated_tokens": counts.repeated_tokens,
            "resumed_tokens": self._resumed_tokens,
            "seconds": seconds,
            "at": time.time(),
            "replicas": [
                {**asdict(replica), "state": replica.state.value}
                for replica in self._live.replicas()
            ],
        }

    # --- the members ---

    def _follow_members(self) -> None:
        self._follower.apply(
            ServiceMember(m.node, m.address, m.expected_remaining_s) for m in self._group.members
        )

    def _tell_worth(self, requests: int) -> None:
        """Report how many nodes have work."""
        remaining = requests - (self._answered + self._failed - self._ended_before)
        slots = max((view.slots for view in self._live.replicas()), default=0)
        if not self._worth or not slots:
            return
        useful = max(1, min(self._max_nodes, math.ceil(remaining / slots)))
        now = time.monotonic()
        if useful == self._useful or now - self._values_at < VALUES_S:
            return
        self._useful, self._values_at = useful, now
        values = {1: self._worth, useful: self._worth * useful}
        self._group.set_values(values)
