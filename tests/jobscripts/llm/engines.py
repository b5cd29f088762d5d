"""The environment of a dispatcher in tests: replicas that generate when they are told to, and
clients that note what they get.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.dispatcher import Dispatcher
from llmserve.generation import (
    DeliverTokens,
    EndRequest,
    FinishReason,
    GenerationRequest,
    PostAttempt,
    StopAttempt,
)
from llmserve.replicas import Capacity
from llmserve.simulated_model import complete_until, digest_of, generate
from llmserve.states import ReplicaState


def answer(request: GenerationRequest) -> tuple[int, ...]:
    """Return the ids that an undisturbed engine generates."""
    return tuple(generate(digest_of(request.prompt), request.max_tokens)[0])


@dataclass
class RunningAttempt:
    """An attempt on an engine."""

    request: GenerationRequest
    digest: int
    remaining: int
    tokens: int
    whole: bool = True


@dataclass
class World:
    """Engines and clients around a dispatcher; every command is carried out at once, but stops,
    which are reported by :meth:`report_stops`.
    """

    dispatcher: Dispatcher
    now: float = 0.0
    capacities: dict[str, Capacity] = field(default_factory=dict)
    engines: dict[str, dict[int, RunningAttempt]] = field(default_factory=dict)
    stops: list[StopAttempt] = field(default_factory=list)
    posts: list[PostAttempt] = field(default_factory=list)
    streams: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, EndRequest] = field(default_factory=dict)

    def carry_out(self, commands) -> None:
        for command in commands:
            if isinstance(command, PostAttempt):
                self._post(command)
            elif isinstance(command, StopAttempt):
                self.stops.append(command)
            elif isinstance(command, DeliverTokens):
                stream = self.streams.setdefault(command.request, [])
                assert command.first == len(stream), "a token is delivered twice, or lost"
                stream.extend(command.ids)
            else:
                assert command.request not in self.ends, "a request ends twice"
                self.ends[command.request] = command

    def _post(self, post: PostAttempt) -> None:
        assert self.dispatcher.replica_states()[post.replica] is ReplicaState.READY
        request, engine = post.request, self.engines[post.replica]
        assert list(post.ids[: len(request.prompt)]) == list(request.prompt)
        assert len(post.ids) + post.max_tokens == len(request.prompt) + request.max_tokens
        engine[post.attempt] = RunningAttempt(
            request, digest_of(post.ids), post.max_tokens, request.tokens
        )
        capacity = self.capacities[post.replica]
        assert len(engine) <= capacity.slots
        assert sum(attempt.tokens for attempt in engine.values()) <= capacity.kv_tokens
        self.posts.append(post)

    def submit(self, request: GenerationRequest, generated=()) -> None:
        self.carry_out(self.dispatcher.submit(request, self.now, generated))

    def add(self, name: str, capacity: Capacity, *, load: bool = True) -> None:
        self.dispatcher.add_replica(name, capacity)
        self.capacities[name], self.engines[name] = capacity, {}
        if load:
            self.load(name)

    def load(self, name: str) -> None:
        self.carry_out(self.dispatcher.replica_loaded(name, self.now))

    def generate(self, name: str, attempt: int, count: int) -> None:
        """An engine generates ids of one attempt, as many as are left at most."""
        running = self.engines[name][attempt]
        count = min(count, running.remaining)
        ids, running.digest = generate(running.digest, count)
        running.remaining -= count
        complete = complete_until(ids, whole=running.whole)
        running.whole = complete == len(ids)
        request = running.request.name
        self.carry_out(self.dispatcher.tokens(request, attempt, ids, complete))
        if not running.remaining:
            del self.engines[name][attempt]
            self.carry_out(
                self.dispatcher.finished(request, attempt, FinishReason.LENGTH, self.now)
            )

    def report_stops(self) -> None:
        """The engines stop what they were asked to stop."""
        stops, self.stops = self.stops, []
        for stop in stops:
            if self.engines.get(stop.replica, {}).pop(stop.attempt, None) is not None:
                self.carry_out(self.dispatcher.stopped(stop.request, stop.attempt, self.now))

    def notice(self, name: str, seconds: float) -> None:
        self.carry_out(self.dispatcher.notice(name, self.now + seconds, self.now))

    def lose(self, name: str) -> None:
        del self.engines[name]
        self.carry_out(self.dispatcher.replica_gone(name, self.now))

    def crash(self, name: str) -> None:
        del self.engines[name]
        self.carry_out(self.dispatcher.replica_failed(name, "out of memory", self.now))

    def refuse_oversize(self, at: float, *, is_loading: bool = False) -> None:
        self.carry_out(self.dispatcher.refuse_oversize(at, is_loading=is_loading))

    def run_to_the_end(self) -> None:
        """Let all engines generate until no request runs."""
        while any(self.engines.values()) or self.stops:
            self.report_stops()
            for name, engine in list(self.engines.items()):
                for attempt in list(engine):
                    if attempt in engine:
                        self.generate(name, attempt, 1_000)
