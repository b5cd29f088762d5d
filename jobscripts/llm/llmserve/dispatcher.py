"""Decides which request runs on which replica, and how it continues when the replica leaves. Pure:
no sockets, no clock. The caller carries out the returned commands.

The dispatcher keeps the ids of every prompt and of every answer so far. An interrupted answer
continues on another replica, which gets the prompt and the ids, with ``max_tokens`` reduced
accordingly. It continues after the last id at which the text was complete: engines repeat text if
they begin within a character.

* The loss of a replica loses no reported id. Its requests go to the front of the queue.
* A replica with notice gets no requests. Requests that may not end in time are moved at once if
  another replica has room for them; their tokens count until they are stopped
  (:mod:`llmserve.leaving_replicas`).
* A request that cannot be continued starts again. If it is a stream that has begun, it fails.
* A request whose attempts end with the engine of a replica fails after MAX_FAILURES attempts. The
  last attempt runs alone, so that no other request fails with it.
* A request that is larger than every ready replica waits for a larger one for a limited time, and
  blocks no other (:mod:`llmserve.oversize`).

Reports name the attempt. Reports about attempts that are not current have no effect.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from llmserve.generation import (
    Command,
    DeliverTokens,
    EndRequest,
    FinishReason,
    GenerationRequest,
    PostAttempt,
    RequestRefusal,
    StopAttempt,
)
from llmserve.leaving_replicas import count_moving, requests_to_move, room
from llmserve.oversize import OversizeRequests
from llmserve.policies.interface import Load, SchedulingPolicy
from llmserve.replicas import Capacity, DispatcherReplica, best_replica, prefix_blocks
from llmserve.states import (
    ENDED,
    REQUEST_TRANSITIONS,
    ReplicaEvent,
    ReplicaState,
    RequestEvent,
    RequestState,
)
from llmserve.tracked_request import MAX_FAILURES, TrackedRequest


class Dispatcher:
    """Requests and replicas of one model. Every method that changes something returns commands, to
    be carried out in order. Times are seconds on the clock of the caller and do not decrease.

    Args:
        policy: chooses the next request, and refuses requests.
        max_request_tokens: maximum of prompt and ``max_tokens`` together, as the model and the
            replicas allow; None: no limit.
    """

    def __init__(self, policy: SchedulingPolicy, max_request_tokens: int | None = None) -> None:
        self._policy = policy
        self._requests: dict[str, TrackedRequest] = {}
        self._replicas: dict[str, DispatcherReplica] = {}
        self._front: deque[TrackedRequest] = deque()
        """Requests that have left the queue of the policy and wait for a replica."""
        self._waiting = 0
        """Number of requests in the queue of the policy."""
        self._oversize = OversizeRequests(max_request_tokens)
        self._attempts = 0
        self.moves = 0
        """Number of attempts that were stopped because their replica leaves."""
        self.losses = 0
        """Number of attempts that were lost with their replica."""
        self.repeated_tokens = 0
        """Number of ids that were reported and have to be generated again."""

    # --- what there is ---

    @property
    def load(self) -> Load:
        """Load of the ready replicas."""
        waiting = self._waiting + sum(not self._is_oversize(t) for t in self._front)
        return Load(waiting, sum(replica.capacity.slots for replica in self._ready()))

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return self._waiting + len(self._front)

    @property
    def largest_tokens(self) -> int:
        """Maximum number of tokens of all replicas so far; 0: none has been ready."""
        return self._oversize.largest_tokens

    def state(self, name: str) -> RequestState | None:
        """Return the state of a request; None if there is none, or it has ended."""
        return self._requests[name].state if name in self._requests else None

    def replica_states(self) -> dict[str, ReplicaState]:
        """Return the state of each replica that has not ended."""
        return {name: replica.state for name, replica in self._replicas.items()}

    def generated(self, name: str) -> tuple[int, ...]:
        """Return the ids of a request that would be continued after a loss. A batch saves them,
        and gives them to :meth:`submit` when it is resumed.
        """
        tracked = self._requests[name]
        return tuple(tracked.generated[: tracked.complete])

    # --- requests ---

    def submit(
        self, request: GenerationRequest, now: float, generated: Sequence[int] = ()
    ) -> list[Command]:
        """Queue a request.

        Args:
            request: its name must be that of no other request that has not ended.
            now: the time.
            generated: ids that it has from an earlier run; they are not delivered again.

        Raises:
            ValueError: the name is taken, or ``generated`` is of a request that cannot be
                continued.
        """
        if request.name in self._requests:
            raise ValueError(f"A request {request.name} exists already; give another name.")
        if len(generated) and not request.continuable:
            raise ValueError(f"Request {request.name} cannot be continued from earlier ids.")
        count = len(generated)
        is_complete = count >= request.max_tokens
        refusal = None if is_complete else self._oversize.refusal(request, self._ready_tokens())
        refusal = refusal or self._policy.admit(request, self.load, now)
        if refusal is not None:
            state = REQUEST_TRANSITIONS[RequestState.QUEUED, RequestEvent.REFUSE]
            end = EndRequest(request.name, state, sentence=refusal.sentence, refusal=refusal)
            return [end]
        tracked = TrackedRequest(request, list(generated), count, count, count)
        if tracked.missing <= 0:
            tracked.change(RequestEvent.FINISH)
            ids = tuple(generated)
            return [EndRequest(request.name, tracked.state, ids, FinishReason.LENGTH)]
        tracked.blocks = prefix_blocks(request.prompt)
        self._requests[request.name] = tracked
        self._policy.enqueue(request, now)
        self._waiting += 1
        return self._dispatch(now)

    def refuse_oversize(self, now: float, *, is_loading: bool) -> list[Command]:
        """Refuse the requests that have waited too long for a larger replica. Call it regularly.

        Args:
            now: the time.
            is_loading: whether a replica is loading, also one that was not added yet.
        """
        commands: list[Command] = []
        for tracked in list(self._front):
            ready = self._ready_tokens()
            refusal = self._oversize.wait(tracked.request, ready, now, is_loading=is_loading)
            if refusal is not None:
                tracked.change(RequestEvent.REFUSE)
                commands.append(self._end(tracked, now, refusal=refusal))
        return commands

    def cancel(self, name: str, now: float) -> list[Command]:
        """Cancel a request. No effect if it has ended."""
        tracked = self._requests.get(name)
        if tracked is None:
            return []
        commands: list[Command] = []
        if tracked.replica:
            commands.append(StopAttempt(name, tracked.attempt, tracked.replica))
        tracked.change(RequestEvent.CANCEL)
        commands.append(self._end(tracked, now))
        return commands + self._dispatch(now)

    def tokens(
        self,
        name: str,
        attempt: int,
        ids: Sequence[int],
        complete: int | None = None,
    ) -> list[Command]:
        """Record further ids of an attempt.

        Args:
            name: name of the request.
            attempt: number of the attempt.
            ids: the new ids, in order.
            complete: number of ``ids`` up to the last one after which the text is complete; None:
                all; 0: after none of them.
        """
        tracked = self._current(name, attempt)
        if tracked is None or not len(ids):
            return []
        base = len(tracked.generated)
        tracked.generated.extend(ids)
        if complete is None:
            tracked.complete = len(tracked.generated)
        elif complete:
            tracked.complete = base + complete
        self._charge(tracked)
        return self._deliver(tracked, tracked.complete)

    def finished(self, name: str, attempt: int, reason: FinishReason, now: float) -> list[Command]:
        """Record that an attempt has generated all its ids, which were reported."""
        tracked = self._current(name, attempt)
        if tracked is None:
            return []
        tracked.complete = len(tracked.generated)
        commands = self._deliver(tracked, tracked.complete)
        tracked.change(RequestEvent.FINISH)
        commands.append(self._end(tracked, now, reason))
        return commands + self._dispatch(now)

    def stopped(self, name: str, attempt: int, now: float) -> list[Command]:
        """Record that an attempt has stopped as requested; all its ids were reported."""
        tracked = self._current(name, attempt)
        if tracked is None:
            return []
        event = RequestEvent.STOPPED if tracked.state is RequestState.MOVING else RequestEvent.LOSE
        return self._return_to_queue(tracked, event, now) + self._dispatch(now)

    def attempt_failed(
        self, name: str, attempt: int, sentence: str, now: float, *, may_repeat: bool
    ) -> list[Command]:
        """Record that an engine has refused or aborted an attempt, and continues to run.

        Args:
            name: name of the request.
            attempt: number of the attempt.
            sentence: what went wrong.
            now: the time.
            may_repeat: whether another attempt may succeed. False for errors of the request.
        """
        tracked = self._current(name, attempt)
        if tracked is None:
            return []
        if may_repeat:
            commands = self._fail_attempt(tracked, sentence, now)
        else:
            tracked.change(RequestEvent.GIVE_UP)
            commands = [self._end(tracked, now, sentence=sentence)]
        return commands + self._dispatch(now)

    # --- replicas ---

    def add_replica(self, name: str, capacity: Capacity) -> None:
        """Add a replica, which begins to load. Raises ValueError if the name belongs to a replica
        that has not ended.
        """
        if name in self._replicas:
            raise ValueError(f"A replica {name} exists already; it has to end first.")
        self._replicas[name] = DispatcherReplica(name, capacity)

    def replica_loaded(self, name: str, now: float) -> list[Command]:
        """Record that a replica is ready. No effect if it has notice."""
        self._replicas[name].change(ReplicaEvent.LOAD)
        tokens = self._replicas[name].capacity.kv_tokens
        self._oversize.add_replica(tokens, is_first=len(self._ready()) == 1)
        return self._dispatch(now)

    def expect_end(self, name: str, lasts_until: float) -> None:
        """Record a forecast: the time at which a replica is expected to end."""
        replica = self._replicas[name]
        if replica.state is not ReplicaState.DRAINING:
            replica.lasts_until = lasts_until

    def measure(self, name: str, token_s: float) -> None:
        """Record a measurement of a replica's engine.

        Args:
            name: name of the replica.
            token_s: seconds per token of one answer while all slots are in use.
        """
        replica = self._replicas[name]
        replica.capacity = dataclasses.replace(replica.capacity, token_s=token_s)

    def notice(self, name: str, ends_at: float, now: float) -> list[Command]:
        """Record that a replica will end at a given time. Requests that do not end before are
        moved, as far as there is room elsewhere.
        """
        replica = self._replicas[name]
        replica.change(ReplicaEvent.NOTICE)
        replica.lasts_until = ends_at
        if replica.reserved_for is not None and replica.reserved_for not in replica.requests:
            replica.reserved_for = None
        return self._dispatch(now)

    def replica_gone(self, name: str, now: float) -> list[Command]:
        """Record that the node of a replica is gone."""
        return self._remove(name, ReplicaEvent.LOSE, "", now)

    def replica_failed(self, name: str, sentence: str, now: float) -> list[Command]:
        """Record that the engine of a replica ended by itself.

        Args:
            name: name of the replica.
            sentence: the cause, for requests that fail.
            now: the time.
        """
        return self._remove(name, ReplicaEvent.CRASH, sentence, now)

    # --- inside ---

    def _current(self, name: str, attempt: int) -> TrackedRequest | None:
        tracked = self._requests.get(name)
        if tracked is None or not tracked.replica or tracked.attempt != attempt:
            return None
        return tracked

    def _charge(self, tracked: TrackedRequest) -> None:
        count = len(tracked.generated) - tracked.charged
        if count > 0:
            self._policy.generated(tracked.request, count)
            tracked.charged += count

    def _deliver(self, tracked: TrackedRequest, until: int) -> list[Command]:
        first = tracked.delivered
        if not tracked.request.stream or until <= first:
            return []
        tracked.delivered = until
        return [DeliverTokens(tracked.request.name, first, tuple(tracked.generated[first:until]))]

    def _release(self, tracked: TrackedRequest) -> None:
        replica = self._replicas.get(tracked.replica)
        if replica is not None:
            replica.release(tracked.request.name)
        tracked.replica = ""

    def _end(
        self,
        tracked: TrackedRequest,
        now: float,
        reason: FinishReason | None = None,
        sentence: str = "",
        refusal: RequestRefusal | None = None,
    ) -> EndRequest:
        """Forget a request in a final state."""
        assert tracked.state in ENDED
        request = tracked.request
        self._release(tracked)
        del self._requests[request.name]
        self._oversize.forget(request.name)
        for replica in self._replicas.values():
            if replica.reserved_for == request.name:
                replica.reserved_for = None
        if tracked.was_taken:
            if tracked in self._front:
                self._front.remove(tracked)
        else:
            self._waiting -= 1
        if tracked.attempt:
            self._policy.ended(request, tracked.charged, now)
        else:
            self._policy.withdraw(request)
        ids = tuple(tracked.generated)
        if refusal is not None:
            sentence = refusal.sentence
        return EndRequest(request.name, tracked.state, ids, reason, sentence, refusal)

    def _return_to_queue(
        self, tracked: TrackedRequest, event: RequestEvent, now: float
    ) -> list[Command]:
        """End the attempt of a request: the request goes to the front of the queue, or ends."""
        request = tracked.request
        keep = tracked.complete if request.continuable else 0
        if (
            request.continuable
            and tracked.missing == 0
            and tracked.complete == len(tracked.generated)
        ):
            tracked.change(RequestEvent.FINISH)
            return [self._end(tracked, now, FinishReason.LENGTH)]
        if tracked.delivered > keep:
            tracked.change(RequestEvent.GIVE_UP)
            sentence = (
                "The node of this answer is gone, and an answer of this kind cannot be continued "
                "(logprobs, several choices, tool calls or a grammar). Send the request again."
            )
            return [self._end(tracked, now, sentence=sentence)]
        self.repeated_tokens += len(tracked.generated) - keep
        del tracked.generated[keep:]
        tracked.complete = keep
        tracked.change(event)
        self._release(tracked)
        self._front.append(tracked)
        return []

    def _fail_attempt(self, tracked: TrackedRequest, sentence: str, now: float) -> list[Command]:
        """Record a failure of which the request may be the cause."""
        tracked.failures += 1
        if tracked.failures < MAX_FAILURES:
            return self._return_to_queue(tracked, RequestEvent.LOSE, now)
        tracked.change(RequestEvent.GIVE_UP)
        text = f"{MAX_FAILURES} attempts ended with an error of the engine, the last: {sentence}"
        return [self._end(tracked, now, sentence=text)]

    def _remove(self, name: str, event: ReplicaEvent, sentence: str, now: float) -> list[Command]:
        replica = self._replicas[name]
        replica.change(event)
        lost = [self._requests[request] for request in replica.requests]
        del self._replicas[name]
        commands: list[Command] = []
        for tracked in lost:
            self.losses += 1
            if event is ReplicaEvent.CRASH:
                commands += self._fail_attempt(tracked, sentence, now)
            else:
                commands += self._return_to_queue(tracked, RequestEvent.LOSE, now)
        return commands + self._dispatch(now)

    def _dispatch(self, now: float) -> list[Command]:
        """Post the requests that fit: first those that were posted before, then those that the
        policy chooses. Meanwhile stop those whose replica leaves; the room that they will need is
        not given away.
        """
        commands: list[Command] = self._dispatch_front(now) + self._move(now)
        if self._front_blocks():
            return commands
        replicas = self._replicas.values()
        moving = count_moving(self._requests, replicas)
        while (request := self._policy.head(now)) is not None:
            tracked = self._requests[request.name]
            if self._is_oversize(tracked):
                self._take(tracked)
                self._front.append(tracked)
                continue
            replica = self._choose(tracked, now)
            if replica is None or (moving and room(tracked.request.tokens, replicas) <= moving):
                break
            self._take(tracked)
            commands.append(self._post(tracked, replica, now))
        return commands

    def _take(self, tracked: TrackedRequest) -> None:
        self._policy.take(tracked.request)
        tracked.was_taken = True
        self._waiting -= 1

    def _ready(self) -> list[DispatcherReplica]:
        return [r for r in self._replicas.values() if r.state is ReplicaState.READY]

    def _is_oversize(self, tracked: TrackedRequest) -> bool:
        """Return whether a request is larger than every ready replica; False if none is ready. Such
        a request blocks no other.
        """
        return 0 < self._ready_tokens() < tracked.request.tokens

    def _ready_tokens(self) -> int:
        """Maximum number of tokens that a ready replica has room for; 0: none is ready."""
        return max((replica.capacity.kv_tokens for replica in self._ready()), default=0)

    def _dispatch_front(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for tracked in list(self._front):
            if tracked.runs_alone:
                self._reserve(tracked)
            replica = self._choose(tracked, now)
            if replica is not None:
                self._front.remove(tracked)
                commands.append(self._post(tracked, replica, now))
        return commands

    def _front_blocks(self) -> bool:
        """Return whether a request in front waits for room that would become free if no other
        request took it.
        """
        ready = self._ready()
        return any(
            not tracked.runs_alone
            and any(
                replica.reserved_for is None
                and tracked.request.tokens <= replica.capacity.kv_tokens
                for replica in ready
            )
            for tracked in self._front
        )

    def _reserve(self, tracked: TrackedRequest) -> None:
        """Reserve the replica with the fewest requests for a request that is to run alone."""
        name = tracked.request.name
        if any(replica.reserved_for == name for replica in self._replicas.values()):
            return
        candidates = [
            replica
            for replica in self._ready()
            if replica.reserved_for is None and tracked.request.tokens <= replica.capacity.kv_tokens
        ]
        if candidates:
            min(candidates, key=lambda replica: len(replica.requests)).reserved_for = name

    def _choose(self, tracked: TrackedRequest, now: float) -> DispatcherReplica | None:
        name = tracked.request.name
        replicas = [
            replica
            for replica in self._replicas.values()
            if not tracked.runs_alone or replica.reserved_for == name
        ]
        return best_replica(
            replicas, name, tracked.request.tokens, tracked.missing, tracked.blocks, now
        )

    def _post(self, tracked: TrackedRequest, replica: DispatcherReplica, now: float) -> PostAttempt:
        request = tracked.request
        if not tracked.attempt:
            self._policy.begin(request, now)
        tracked.change(RequestEvent.POST)
        self._oversize.forget(request.name)
        self._attempts += 1
        tracked.attempt, tracked.replica = self._attempts, replica.name
        replica.hold(request.name, request.tokens)
        replica.prefixes.add(tracked.blocks)
        ids = [*request.prompt, *tracked.generated] if tracked.generated else request.prompt
        return PostAttempt(request, tracked.attempt, replica.name, ids, tracked.missing)

    def _move(self, now: float) -> list[Command]:
        """Stop attempts on leaving replicas that may not end in time."""
        if self._front_blocks():
            return []
        commands: list[Command] = []
        for tracked in requests_to_move(self._requests, self._replicas.values(), now):
            tracked.change(RequestEvent.MOVE)
            self.moves += 1
            commands.append(StopAttempt(tracked.request.name, tracked.attempt, tracked.replica))
        return commands
