"""The dispatcher on a virtual clock: clients, simulated engines, and nodes that come and go. Pure.

The dispatcher and its policy are those that serve real clients; engines are simulated, and the
network takes no time. An engine reports new tokens when an answer begins or ends, and every
:data:`REPORT_S` seconds in between.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from llmserve.dispatcher import Dispatcher
from llmserve.engine_model import EngineReport, EngineTimes, SimulatedEngine
from llmserve.generation import (
    Command,
    EndRequest,
    FinishReason,
    GenerationRequest,
    PostAttempt,
    StopAttempt,
)
from llmserve.policies.interface import INPUT_WEIGHT, OUTPUT_WEIGHT, SchedulingPolicy
from llmserve.replicas import Capacity
from llmserve.states import RequestState

REPORT_S = 0.5


@dataclass(frozen=True)
class Arrival:
    """The arrival of a request at a time, seconds."""

    time: float
    request: GenerationRequest


@dataclass(frozen=True)
class Presence:
    """The time in which a node is present."""

    replica: str
    """Name; unique in a simulation."""
    start: float
    end: float = math.inf
    load_s: float = 0.0
    """Seconds until its engine is ready."""
    notice_s: float | None = None
    """Seconds before its end at which the dispatcher gets notice; None: it gets none."""
    detection_s: float = 0.0
    """Seconds after its end until the dispatcher detects it."""


@dataclass
class RequestRecord:
    """The record of one request."""

    request: GenerationRequest
    arrived: float
    first_token: float | None = None
    """Time of the first token; None if there was none."""
    last_token: float | None = None
    longest_stall_s: float = 0.0
    """Longest time between two tokens."""
    end: EndRequest | None = None
    """None if it had not ended when the simulation did."""
    ended: float | None = None
    """Time of the end."""
    attempts: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first token; None if there was none."""
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass
class ServingResult:
    """The result of a simulation."""

    records: dict[str, RequestRecord] = field(default_factory=dict)
    """Name of a request → its record."""
    service: dict[str, float] = field(default_factory=dict)
    """User → service: that of the posted prompts and of the generated tokens."""
    tokens: int = 0
    """Number of tokens of prompts and answers. Tokens of a request that was posted again, or that
    were generated again, count once."""
    end: float = 0.0
    """Time of the last event."""
    moves: int = 0
    losses: int = 0
    repeated_tokens: int = 0

    def count(self, state: RequestState) -> int:
        """Return the number of requests that ended in a state."""
        return sum(r.end is not None and r.end.state is state for r in self.records.values())


Followers = Callable[[RequestRecord], Iterable[Arrival]]
"""Returns the requests that a client sends because another one ended: record of that one →
arrivals.
"""
Observer = Callable[[float, str, float], None]
"""Called with each amount of service: (time, user, service)."""


class ServingSimulation:
    """One simulation.

    Args:
        policy: the policy of the dispatcher.
        times: durations of an iteration of every engine.
        capacity: the capacity of every replica; its ``token_s`` is computed from ``times`` if it is
        0.
        followers: requests that follow from the ends of others.
        observer: called with each amount of service.
        max_request_tokens: maximum number of tokens of a request; None: no limit.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        times: EngineTimes,
        capacity: Capacity,
        *,
        followers: Followers | None = None,
        observer: Observer | None = None,
        max_request_tokens: int | None = None,
    ) -> None:
        if not capacity.token_s:
            capacity = Capacity(capacity.slots, capacity.kv_tokens, times.token_s(capacity))
        self._times, self._capacity = times, capacity
        self._dispatcher = Dispatcher(policy, max_request_tokens)
        self._followers, self._observer = followers, observer
        self._engines: dict[str, SimulatedEngine] = {}
        self._names: dict[int, str] = {}
        """Attempt → request."""
        self._since: dict[int, int] = {}
        """Attempt → number of ids of its request that are reported or were part of its prompt."""
        self._counted: dict[str, int] = {}
        """Request that has not ended → number of ids that were counted."""
        self._due: dict[str, float] = {}
        """Replica → time of its next event in the queue."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.result = ServingResult()

    def run(
        self, arrivals: Iterable[Arrival], nodes: Iterable[Presence], until: float = math.inf
    ) -> ServingResult:
        """Run until no event is left, or until a time. Return the result.

        Args:
            arrivals: requests in the order of time.
            nodes: nodes in any order.
            until: end of the simulation, seconds.
        """
        for node in nodes:
            self._schedule_node(node)
        self._next_arrival(iter(arrivals))
        while self._events and self._events[0][0] <= until:
            now, _, event = heapq.heappop(self._events)
            self.result.end = now
            event(now)
        dispatcher, result = self._dispatcher, self.result
        if not math.isinf(until):
            result.end = until
            for replica in list(self._engines):
                self._report(replica, until)
        result.moves, result.losses = dispatcher.moves, dispatcher.losses
        result.repeated_tokens = dispatcher.repeated_tokens
        return result

    # --- events ---

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _next_arrival(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return

        def arrive(now: float) -> None:
            self._next_arrival(arrivals)
            self._submit(arrival, now)

        self._at(arrival.time, arrive)

    def _submit(self, arrival: Arrival, now: float) -> None:
        request = arrival.request
        self.result.records[request.name] = RequestRecord(request, arrival.time)
        self._counted[request.name] = 0
        self._carry_out(self._dispatcher.submit(request, now), now)

    def _schedule_node(self, node: Presence) -> None:
        name = node.replica

        def join(now: float) -> None:
            self._dispatcher.add_replica(name, self._capacity)

        def load(now: float) -> None:
            if name in self._dispatcher.replica_states():
                self._engines[name] = SimulatedEngine(self._times)
                self._carry_out(self._dispatcher.replica_loaded(name, now), now)

        def notice(now: float) -> None:
            self._carry_out(self._dispatcher.notice(name, node.end, now), now)

        def leave(now: float) -> None:
            self._report(name, now)
            self._engines.pop(name, None)
            self._at(now + node.detection_s, detect)

        def detect(now: float) -> None:
            self._carry_out(self._dispatcher.replica_gone(name, now), now)

        self._at(node.start, join)
        if node.start + node.load_s < node.end:
            self._at(node.start + node.load_s, load)
        if math.isinf(node.end):
            return
        if node.notice_s is not None:
            self._at(max(node.start, node.end - node.notice_s), notice)
        self._at(node.end, leave)

    def _carry_out(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, PostAttempt):
                self._post(command, now)
            elif isinstance(command, StopAttempt):
                self._stop(command, now)
            elif isinstance(command, EndRequest):
                self._end(command, now)

    def _post(self, post: PostAttempt, now: float) -> None:
        request = post.request
        record = self.result.records[request.name]
        if not record.attempts:
            self.result.tokens += len(request.prompt)
            self._count(request.user, INPUT_WEIGHT * len(request.prompt), now)
        record.attempts += 1
        self._names[post.attempt] = request.name
        self._since[post.attempt] = request.max_tokens - post.max_tokens
        engine = self._engines.get(post.replica)
        if engine is None:
            return  # the node is gone, which is not detected yet
        self._report(post.replica, now)
        engine.post(post.attempt, post.ids, post.max_tokens, now)
        self._wake(post.replica, now)

    def _stop(self, stop: StopAttempt, now: float) -> None:
        engine = self._engines.get(stop.replica)
        if engine is None:
            return

        def stopped(later: float) -> None:
            self._carry_out(self._dispatcher.stopped(stop.request, stop.attempt, later), later)

        self._report(stop.replica, now)
        engine.stop(stop.attempt)
        self._at(now, stopped)

    def _end(self, end: EndRequest, now: float) -> None:
        record = self.result.records[end.request]
        record.end, record.ended = end, now
        del self._counted[end.request]
        if self._followers is not None:
            for arrival in self._followers(record):
                self._schedule_arrival(arrival, now)

    def _schedule_arrival(self, arrival: Arrival, now: float) -> None:
        self._at(max(now, arrival.time), lambda at: self._submit(arrival, at))

    # --- engines ---

    def _wake(self, replica: str, now: float) -> None:
        """Let an engine report at its next event."""
        engine = self._engines.get(replica)
        due = None if engine is None else engine.next_event()
        if due is None:
            self._due.pop(replica, None)
            return
        time = max(now, min(due, now + REPORT_S))
        self._due[replica] = time

        def report(at: float) -> None:
            if self._due.get(replica) == at:
                self._report(replica, at)
                self._wake(replica, at)

        self._at(time, report)

    def _report(self, replica: str, now: float) -> None:
        """Tell the dispatcher what an engine has generated until now."""
        engine = self._engines.get(replica)
        for progress in engine.advance(now) if engine is not None else ():
            self._tell(progress, now)

    def _tell(self, progress: EngineReport, now: float) -> None:
        name = self._names[progress.attempt]
        if self._dispatcher.state(name) is None:
            return
        record = self.result.records[name]
        first = self._since[progress.attempt]
        if record.first_token is None:
            record.first_token = progress.first_at
        elif record.last_token is not None:
            record.longest_stall_s = max(
                record.longest_stall_s, progress.first_at - record.last_token
            )
        record.last_token = progress.last_at
        total = self._since[progress.attempt] = first + len(progress.ids)
        count = total - self._counted[name]
        if count > 0:
            self._counted[name] = total
            self.result.tokens += count
            self._count(record.request.user, OUTPUT_WEIGHT * count, progress.last_at)
        commands = self._dispatcher.tokens(name, progress.attempt, progress.ids, progress.complete)
        if progress.is_last:
            commands = commands + self._dispatcher.finished(
                name, progress.attempt, FinishReason.LENGTH, now
            )
        self._carry_out(commands, now)

    def _count(self, user: str, service: float, time: float) -> None:
        self.result.service[user] = self.result.service.get(user, 0.0) + service
        if self._observer is not None:
            self._observer(time, user, service)
