"""The dispatcher on the real clock: posts attempts to replicas and returns their results.

It carries out the commands of :class:`llmserve.dispatcher.Dispatcher` and reports to it, and
decides only which replicas cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmserve.answers import AnswerPart, AnswerResult, AnswerStream
from llmserve.credentials import bearer_token
from llmserve.dispatcher import Dispatcher
from llmserve.generation import (
    Command,
    DeliverTokens,
    EndRequest,
    FinishReason,
    GenerationRequest,
    PostAttempt,
    StopAttempt,
)
from llmserve.live_replica import LiveReplica
from llmserve.live_status import LiveCounts, ReplicaView
from llmserve.policies.interface import Load, SchedulingPolicy
from llmserve.replica_client import (
    EngineCrash,
    EngineRefusal,
    ReplicaClient,
    ReplicaUnreachable,
)
from llmserve.replica_status import ReplicaStatus
from llmserve.replicas import Capacity
from llmserve.states import ReplicaState, RequestState
from llmserve.text import AnswerDecoder, StopStrings, Tokenizer

log = logging.getLogger("llmserve")

POLL_S = 0.5
"""Interval of status requests to a replica, seconds."""
SILENCE_S = 10.0
"""Time without an answer after which a replica counts as gone, seconds. It is longer than a busy
machine needs to answer. A broken connection is detected at once.
"""
PROBE_S = 1.0
"""Maximum time for the answer of a replica after a connection to it broke, seconds."""


@dataclass(eq=False)
class _Answer:
    """The dispatcher's record of a request until it ends."""

    request: GenerationRequest
    parameters: Mapping[str, Any]
    stream: AnswerStream
    decoder: AnswerDecoder
    stops: StopStrings
    submitted_at: float
    path: str = ""
    """Path of a body that is posted unchanged; empty: ids are posted."""
    text: list[str] = field(default_factory=list)
    unshown: list[str] = field(default_factory=list)
    """Text that comes with the next part."""
    body: dict[str, Any] | None = None
    engine_status: int = 0
    attempts: int = 0
    first_token_at: float | None = None

    def read(self, ids: Sequence[int]) -> int:
        """Decode ids. Return the number of them after which the text was complete the last time."""
        text, complete = self.decoder.add(ids)
        self.show(self.stops.add(text))
        return complete

    def show(self, text: str) -> None:
        if text:
            self.text.append(text)
            if self.request.stream:
                self.unshown.append(text)

    def take_unshown(self) -> str:
        text = "".join(self.unshown)
        self.unshown.clear()
        return text


class LiveDispatcher:
    """Requests and replicas of one model, in the running asyncio loop.

    ::

        async with LiveDispatcher(FairServe(), tokenizer, "llama", key=key) as dispatcher:
            dispatcher.add_replica("node1", "node1:4711")
            request = GenerationRequest("r1", "alice", tokenizer.encode("Hello"), 100, stream=True)
            answer = dispatcher.submit(request, {"temperature": 0})
            async for part in answer:
                print(part.text)
            result = await answer.result()

    * **Requests.** :meth:`submit` never waits: the request is queued, posted or refused. The
      :class:`AnswerStream` has its parts and its result, whatever the state of its end. A client
      that is gone calls :meth:`AnswerStream.cancel`.
    * **Replicas.** Whoever follows the members of the service adds and removes them. A replica is
      asked every :data:`POLL_S` how it is: it gets requests from when it is ready. One whose
      connection breaks and that does not answer within :data:`PROBE_S`, or that is silent for
      :data:`SILENCE_S`, is gone for the dispatcher. It is asked further, and comes back when it
      answers, until it is removed.
    * **Counts.** :meth:`counts` and :meth:`replicas`, for metrics and status.

    All methods are to be called in the loop in which it was entered.

    Args:
        policy: whose request is next, and which are refused.
        tokenizer: of the model.
        model: its name, as the engines call it.
        key: of the job of the replicas; the bearer token is made from it. Empty: none is sent.
        max_request_tokens: maximum of prompt and ``max_tokens`` together; None: no limit.
        clock: seconds that do not decrease.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        tokenizer: Tokenizer,
        model: str,
        *,
        key: bytes = b"",
        max_request_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_request_tokens = max_request_tokens
        self._dispatcher = Dispatcher(policy, max_request_tokens)
        self._token = bearer_token(key)
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._replicas: dict[str, LiveReplica] = {}
        self._counts = LiveCounts()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LiveDispatcher:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Cancel what has not ended, and close all connections."""
        for name in list(self._answers):
            self._cancel(name)
        clients = [replica.client for replica in self._replicas.values()]
        self._replicas.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)

    # --- requests ---

    def submit(
        self,
        request: GenerationRequest,
        parameters: Mapping[str, Any] | None = None,
        generated: Sequence[int] = (),
    ) -> AnswerStream:
        """Queue a request.

        Args:
            request: with its user, application and interaction; its name must be that of no other
                request that has not ended.
            parameters: further fields of the body of ``/v1/completions``, such as ``temperature``.
                ``stop`` is applied here and not by the engine.
            generated: ids that it has from an earlier run; no parts come of them.

        Returns:
            Its answer.

        Raises:
            ValueError: the name is taken, or ``generated`` is of a request that cannot be
                continued.
        """
        fields = dict(parameters or {})
        stops = fields.pop("stop", None) or ()
        answer = self._accept(request, fields, [stops] if isinstance(stops, str) else stops)
        answer.read(generated)
        answer.take_unshown()
        return self._submit(answer, generated)

    def submit_body(
        self, request: GenerationRequest, path: str, body: Mapping[str, Any]
    ) -> AnswerStream:
        """Queue a request whose body goes to an engine as it is, and whose answer comes back as it
        is (``result().body``): for what cannot be continued
        (:attr:`llmserve.client_bodies.ClientOrder.continuable`). After a loss it starts again.

        Args:
            request: with ``continuable=False`` and ``stream=False``; its prompt and ``max_tokens``
                are those that are counted.
            path: such as ``/v1/chat/completions``.
            body: of the client; ``stream`` is left out.

        Raises:
            ValueError: the name is taken, or the request is of another kind.
        """
        if request.continuable or request.stream:
            raise ValueError(f"Request {request.name} is posted whole; it has no stream.")
        dropped = ("stream", "stream_options")
        fields = {name: value for name, value in body.items() if name not in dropped}
        answer = self._accept(request, fields, ())
        answer.path = path
        return self._submit(answer, ())

    def generated(self, request: str) -> tuple[int, ...]:
        """Return the ids of a request that has not ended from which it could be continued."""
        return self._dispatcher.generated(request)

    def state(self, request: str) -> RequestState | None:
        """Return the state of a request; None if it does not exist or has ended."""
        return self._dispatcher.state(request)

    # --- replicas ---

    def add_replica(self, name: str, address: str, capacity: Capacity | None = None) -> None:
        """Add a replica, which may still load.

        Args:
            name: name of its node.
            address: ``HOST:PORT``, or ``unix:PATH``.
            capacity: capacity of an engine without a front; None: the front reports it.

        Raises:
            ValueError: a replica of this name exists.
        """
        if name in self._replicas:
            raise ValueError(f"A replica {name} exists already; remove it first.")
        client = ReplicaClient(address, self._token)
        replica = LiveReplica(name, client, capacity, added_at=self._clock())
        self._replicas[name] = replica
        replica.task = self._start(self._follow(replica))

    def notice(self, name: str, seconds: float) -> None:
        """Record that the node of a replica will be taken after a number of seconds. Requests that
        would not end before are moved. No effect on an unknown replica.
        """
        replica = self._replicas.get(name)
        if replica is not None and replica.is_known:
            now = self._clock()
            self._carry_out(self._dispatcher.notice(name, now + seconds, now))

    def expect_end(self, name: str, seconds: float) -> None:
        """Record a forecast: the number of seconds for which the node of a replica is expected to
        last. The replica may still load.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.lasts_until = self._clock() + seconds
        if replica.is_known:
            self._dispatcher.expect_end(name, replica.lasts_until)

    def remove_replica(self, name: str) -> None:
        """Remove a replica. No effect on an unknown one."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        self._lose(replica)
        if replica.task is not None:
            replica.task.cancel()
        self._start(replica.client.close())

    # --- state ---

    @property
    def load(self) -> Load:
        """Load of the ready replicas."""
        return self._dispatcher.load

    @property
    def largest_tokens(self) -> int:
        """Maximum number of tokens of all replicas so far; 0: none has been ready."""
        return self._dispatcher.largest_tokens

    @property
    def may_hold_more(self) -> bool:
        """Return whether a replica that is not ready may have room for more tokens than all
        replicas so far.
        """
        largest, now = self.largest_tokens, self._clock()
        return any(each.may_hold_more(largest, now) for each in self._replicas.values())

    def counts(self) -> LiveCounts:
        """Return the counts since the start."""
        counts = self._counts
        counts.moves = self._dispatcher.moves
        counts.losses = self._dispatcher.losses
        counts.repeated_tokens = self._dispatcher.repeated_tokens
        counts.queued = self._dispatcher.queued
        counts.running = sum(len(replica.attempts) for replica in self._replicas.values())
        return counts

    def replicas(self) -> list[ReplicaView]:
        """Return the replicas in the order in which they were added."""
        states = self._dispatcher.replica_states()
        return [replica.view(states) for replica in self._replicas.values()]

    # --- inside: requests ---

    def _accept(
        self, request: GenerationRequest, parameters: Mapping[str, Any], stops: Sequence[str]
    ) -> _Answer:
        if request.name in self._answers:
            raise ValueError(f"A request {request.name} exists already; give another name.")
        stream = AnswerStream(request.name, lambda: self._cancel(request.name))
        decoder = self.tokenizer.decoder(request.prompt)
        return _Answer(request, parameters, stream, decoder, StopStrings(stops), self._clock())

    def _submit(self, answer: _Answer, generated: Sequence[int]) -> AnswerStream:
        name = answer.request.name
        commands = self._dispatcher.submit(answer.request, answer.submitted_at, generated)
        self._answers[name] = answer
        self._counts.submitted += 1
        self._counts.prompt_tokens += len(answer.request.prompt)
        self._carry_out(commands)
        return answer.stream

    def _cancel(self, name: str) -> None:
        self._carry_out(self._dispatcher.cancel(name, self._clock()))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, PostAttempt):
                self._post(command)
            elif isinstance(command, StopAttempt):
                self._stop(command)
            elif isinstance(command, DeliverTokens):
                answer = self._answers[command.request]
                answer.stream.add(AnswerPart(answer.take_unshown(), command.ids))
            else:
                self._end(command)

    def _post(self, post: PostAttempt) -> None:
        answer, replica = self._answers[post.request.name], self._replicas[post.replica]
        if post.max_tokens < post.request.max_tokens:
            answer.decoder.rewind()
        else:  # it starts, perhaps again
            answer.decoder = self.tokenizer.decoder(answer.request.prompt)
            answer.stops.clear()
            answer.text.clear()
            answer.unshown.clear()
        answer.attempts += 1
        self._counts.attempts += 1
        task = self._start(self._attempt(post, answer, replica))
        replica.attempts[post.attempt] = task
        task.add_done_callback(lambda _: replica.attempts.pop(post.attempt, None))

    def _stop(self, stop: StopAttempt) -> None:
        replica = self._replicas.get(stop.replica)
        task = None if replica is None else replica.attempts.get(stop.attempt)
        if task is None:
            return  # the request has ended, which is reported separately

        def stopped(_: asyncio.Task[None]) -> None:
            commands = self._dispatcher.stopped(stop.request, stop.attempt, self._clock())
            self._carry_out(commands)

        task.add_done_callback(stopped)
        task.cancel()

    def _end(self, end: EndRequest) -> None:
        answer = self._answers.pop(end.request)
        if end.state is RequestState.DONE and not answer.stops.has_stopped:
            answer.show(answer.stops.add(answer.decoder.end()))
            answer.show(answer.stops.end())
        if text := answer.take_unshown():
            answer.stream.add(AnswerPart(text, ()))
        self._counts.ended[end.state] += 1
        answer.stream.end(
            AnswerResult(
                end.state,
                "".join(answer.text),
                end.ids,
                len(answer.request.prompt),
                end.reason,
                end.sentence,
                end.refusal,
                answer.engine_status,
                answer.body,
                answer.attempts,
                answer.submitted_at,
                answer.first_token_at,
                self._clock(),
            )
        )

    # --- inside: attempts ---

    async def _attempt(self, post: PostAttempt, answer: _Answer, replica: LiveReplica) -> None:
        try:
            if answer.path:
                await self._read_whole(post, answer, replica)
            else:
                await self._read_ids(post, answer, replica)
        except EngineRefusal as refusal:
            answer.engine_status = 0 if refusal.may_repeat else refusal.status
            self._fail_attempt(post, refusal.sentence, may_repeat=refusal.may_repeat)
        except EngineCrash as error:
            self._crash(replica, str(error))
        except ReplicaUnreachable as error:
            if await self._is_there(replica):
                self._fail_attempt(post, f"The connection broke: {error}", may_repeat=True)
            else:
                replica.sentence = str(error)
                self._lose(replica)
        except Exception as error:  # an answer of an unexpected form
            log.exception("an attempt of request %s failed", post.request.name)
            self._fail_attempt(post, f"{type(error).__name__}: {error}", may_repeat=True)

    def _fail_attempt(self, post: PostAttempt, sentence: str, *, may_repeat: bool) -> None:
        name, now = post.request.name, self._clock()
        self._carry_out(
            self._dispatcher.attempt_failed(
                name, post.attempt, sentence, now, may_repeat=may_repeat
            )
        )

    async def _read_ids(self, post: PostAttempt, answer: _Answer, replica: LiveReplica) -> None:
        name, number = post.request.name, post.attempt
        count_before = post.request.max_tokens - post.max_tokens
        body = {
            **answer.parameters,
            "model": self.model,
            "prompt": list(post.ids),
            "max_tokens": post.max_tokens,
        }
        if "min_tokens" in body:
            body["min_tokens"] = max(0, body["min_tokens"] - count_before)
        async with contextlib.aclosing(replica.client.generate(body)) as chunks:
            async for chunk in chunks:
                self._note_tokens(answer, len(chunk.ids))
                complete = answer.read(chunk.ids)
                self._carry_out(self._dispatcher.tokens(name, number, chunk.ids, complete))
                reason = FinishReason.STOP if answer.stops.has_stopped else chunk.reason
                if reason is not None:
                    self._carry_out(self._dispatcher.finished(name, number, reason, self._clock()))
                if answer.stops.has_stopped:
                    return

    async def _read_whole(self, post: PostAttempt, answer: _Answer, replica: LiveReplica) -> None:
        name, number = post.request.name, post.attempt
        answer.body = await replica.client.whole(
            answer.path, {**answer.parameters, "model": self.model}
        )
        usage = answer.body.get("usage") or {}
        most = post.max_tokens * post.request.choices
        count = min(most, int(usage.get("completion_tokens", 0)))
        self._note_tokens(answer, count)
        self._dispatcher.tokens(name, number, [0] * count)
        self._carry_out(self._dispatcher.finished(name, number, FinishReason.STOP, self._clock()))

    def _note_tokens(self, answer: _Answer, count: int) -> None:
        self._counts.generated_tokens += count
        if count and answer.first_token_at is None:
            answer.first_token_at = self._clock()

    # --- inside: replicas ---

    async def _follow(self, replica: LiveReplica) -> None:
        """Request the status of a replica regularly until it is removed."""
        replica.answered_at = self._clock()
        while True:
            asked_at = self._clock()
            try:
                self._apply(replica, await replica.ask(), asked_at)
            except (ReplicaUnreachable, ValueError) as error:
                replica.sentence = str(error)
                if self._clock() - replica.answered_at >= SILENCE_S:
                    self._lose(replica)
            await asyncio.sleep(POLL_S)

    async def _is_there(self, replica: LiveReplica) -> bool:
        """Return whether a replica answers after a connection to it broke."""
        asked_at = self._clock()
        try:
            self._apply(replica, await replica.ask(timeout_s=PROBE_S), asked_at)
        except ReplicaUnreachable:
            return False
        return replica.is_known

    def _apply(self, replica: LiveReplica, status: ReplicaStatus, asked_at: float) -> None:
        """Handle the status of a replica that was requested at ``asked_at``."""
        now = replica.answered_at = self._clock()
        if self._replicas.get(replica.name) is not replica or asked_at < replica.lost_at:
            return
        replica.status, replica.sentence = status, status.sentence
        if status.state == ReplicaState.FAILED:
            self._crash(replica, status.sentence)
        elif status.state == ReplicaState.LOADING:
            self._lose(replica)  # its engine was started again
        elif status.state == ReplicaState.READY:
            if replica.had_notice and not replica.attempts:
                self._lose(replica)  # the notice was withdrawn
            self._admit(replica, status, now)
            if self._dispatcher.queued:
                self._carry_out(
                    self._dispatcher.refuse_oversize(now, is_loading=self.may_hold_more)
                )
        elif status.state == ReplicaState.DRAINING and replica.is_known and not replica.had_notice:
            replica.had_notice = True
            self.notice(replica.name, status.ends_in_s or 0.0)

    def _admit(self, replica: LiveReplica, status: ReplicaStatus, now: float) -> None:
        """Record that a replica is ready."""
        if replica.is_known:
            self._dispatcher.measure(replica.name, status.token_s)
            return
        replica.is_known, replica.had_notice = True, False
        capacity = Capacity(status.slots, status.kv_tokens, status.token_s)
        self._dispatcher.add_replica(replica.name, capacity)
        if replica.lasts_until is not None:
            self._dispatcher.expect_end(replica.name, replica.lasts_until)
        self._carry_out(self._dispatcher.replica_loaded(replica.name, now))

    def _lose(self, replica: LiveReplica) -> None:
        if not replica.is_known:
            return
        self._forget(replica)
        self._carry_out(self._dispatcher.replica_gone(replica.name, self._clock()))

    def _crash(self, replica: LiveReplica, sentence: str) -> None:
        replica.sentence = sentence
        if not replica.is_known:
            return
        self._forget(replica)
        self._carry_out(self._dispatcher.replica_failed(replica.name, sentence, self._clock()))

    def _forget(self, replica: LiveReplica) -> None:
        replica.is_known, replica.lost_at = False, self._clock()
        current = asyncio.current_task()
        for task in list(replica.attempts.values()):
            if task is not current:
                task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
