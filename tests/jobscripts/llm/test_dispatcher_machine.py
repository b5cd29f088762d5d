"""The dispatcher under any order of events: no token is lost or comes twice, all requests end."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from llmserve.dispatcher import Dispatcher
from llmserve.generation import GenerationRequest
from llmserve.policies import FairServe, Fcfs, RequestsPerMinute, VirtualTokenCounter
from llmserve.replicas import Capacity
from llmserve.states import ReplicaState, RequestState
from llmserve.tracked_request import MAX_FAILURES

from tests.draws import cases
from tests.jobscripts.llm.engines import World, answer


class Recorded:
    """A policy that counts what it charges."""

    def __init__(self, policy):
        self._policy, self.tokens, self.prompts = policy, Counter(), Counter()

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def begin(self, request, now):
        self.prompts[request.name] += 1
        self._policy.begin(request, now)

    def generated(self, request, count):
        self.tokens[request.name] += count
        self._policy.generated(request, count)


POLICIES = {
    "fcfs": Fcfs,
    "rpm": lambda: RequestsPerMinute(10_000),
    "vtc": VirtualTokenCounter,
    "fairserve": FairServe,
}
NODES = ("n0", "n1", "n2")


class DispatcherMachine(RuleBasedStateMachine):
    """Requests, losses, notices, crashes, stops and cancellations in any order."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy):
        self.policy = Recorded(POLICIES[policy]())
        self.world = World(Dispatcher(self.policy))
        self.requests: dict[str, GenerationRequest] = {}
        self.cancelled: set[str] = set()
        self.crashes: Counter[str] = Counter()
        self.loading: set[str] = set()
        self.noticed: set[str] = set()
        self.refused: set[str] = set()

    @rule(
        user=st.sampled_from("ab"),
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        tokens=st.integers(1, 30),
        continuable=st.sampled_from([True, True, False]),
        stream=st.booleans(),
        interaction=st.sampled_from(["", "i"]),
        last=st.booleans(),
        resumed=st.integers(0, 3),
    )
    def submit(self, user, prompt, tokens, continuable, stream, interaction, last, resumed):
        name = f"r{len(self.requests)}"
        new = GenerationRequest(
            name,
            user,
            tuple(prompt),
            tokens,
            interaction=interaction,
            ends_interaction=last,
            stream=stream,
            continuable=continuable,
        )
        self.requests[name] = new
        generated = answer(new)[:resumed] if continuable else ()
        if stream:
            self.world.streams[name] = list(generated)
        self.world.submit(new, generated)
        if name in self.world.ends and self.world.ends[name].refusal is not None:
            assert new.tokens > self._ready_tokens()
            self.refused.add(name)

    def _free(self):
        return [name for name in NODES if name not in self.world.engines]

    @precondition(lambda self: self._free())
    @rule(
        pick=st.integers(0, 9),
        slots=st.integers(1, 3),
        kv=st.integers(10, 80),
        load=st.booleans(),
        token_s=st.sampled_from([0.0, 1.0]),
    )
    def add(self, pick, slots, kv, load, token_s):
        name = self._free()[pick % len(self._free())]
        self.world.add(name, Capacity(slots, kv, token_s), load=load)
        if not load:
            self.loading.add(name)

    @precondition(lambda self: self.loading)
    @rule(pick=st.integers(0, 9))
    def load(self, pick):
        name = sorted(self.loading)[pick % len(self.loading)]
        self.loading.discard(name)
        self.world.load(name)

    @precondition(lambda self: any(self.world.engines.values()))
    @rule(pick=st.integers(0, 99), count=st.integers(1, 12))
    def generate(self, pick, count):
        running = [(n, a) for n, engine in sorted(self.world.engines.items()) for a in engine]
        self.world.generate(*running[pick % len(running)], count)

    @precondition(lambda self: self.world.engines)
    @rule(pick=st.integers(0, 9), seconds=st.sampled_from([0.0, 5.0, 30.0]))
    def notice(self, pick, seconds):
        name = sorted(self.world.engines)[pick % len(self.world.engines)]
        self.noticed.add(name)
        self.world.notice(name, seconds)

    def _forget(self, name):
        self.loading.discard(name)
        self.noticed.discard(name)

    @precondition(lambda self: self.world.engines)
    @rule(pick=st.integers(0, 9))
    def lose(self, pick):
        name = sorted(self.world.engines)[pick % len(self.world.engines)]
        self._forget(name)
        self.world.lose(name)

    @precondition(lambda self: self.world.engines)
    @rule(pick=st.integers(0, 9))
    def crash(self, pick):
        name = sorted(self.world.engines)[pick % len(self.world.engines)]
        self._forget(name)
        on_it = {
            attempt.request.name
            for attempt in self.world.engines[name].values()
            if attempt.request.name not in self.world.ends
        }
        self.crashes.update(on_it)
        self.world.crash(name)

    @precondition(lambda self: any(self.world.engines.values()))
    @rule(pick=st.integers(0, 99))
    def engine_error(self, pick):
        """One attempt fails, its engine goes on."""
        running = [(n, a) for n, engine in sorted(self.world.engines.items()) for a in engine]
        name, attempt = running[pick % len(running)]
        request = self.world.engines[name].pop(attempt).request.name
        if request not in self.world.ends:
            self.crashes[request] += 1
        self.world.carry_out(
            self.world.dispatcher.attempt_failed(
                request, attempt, "status 500", self.world.now, may_repeat=True
            )
        )

    @rule()
    def report_stops(self):
        self.world.report_stops()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick):
        name = sorted(self.requests)[pick % len(self.requests)]
        if name not in self.world.ends:
            self.cancelled.add(name)
        commands = self.world.dispatcher.cancel(name, self.world.now)
        for engine in self.world.engines.values():  # closing its connection stops it
            for attempt in [a for a, r in engine.items() if r.request.name == name]:
                del engine[attempt]
        self.world.carry_out(commands)

    @rule(seconds=st.sampled_from([1.0, 100.0]), is_loading=st.booleans())
    def wait(self, seconds, is_loading):
        self.world.now += seconds
        before = set(self.world.ends)
        self.world.refuse_oversize(self.world.now, is_loading=is_loading)
        for name in set(self.world.ends) - before:
            assert self.world.ends[name].state is RequestState.REFUSED
            assert self.requests[name].tokens > self._ready_tokens()
            self.refused.add(name)

    def _ready_tokens(self):
        states = self.world.dispatcher.replica_states()
        sizes = [self.world.capacities[n].kv_tokens for n, s in states.items() if s == "ready"]
        return max(sizes, default=math.inf)

    @invariant()
    def streams_are_beginnings_of_the_undisturbed_answers(self):
        if not hasattr(self, "world"):
            return
        for name, stream in self.world.streams.items():
            assert tuple(stream) == answer(self.requests[name])[: len(stream)]

    @invariant()
    def no_replica_is_idle_beside_a_request_that_fits(self):
        if not hasattr(self, "world"):
            return
        states = self.world.dispatcher.replica_states()
        if any(count >= MAX_FAILURES - 1 for count in self.crashes.values()):
            return
        if any(self.world.dispatcher.state(n) is RequestState.MOVING for n in self.requests):
            return
        idle = [
            self.world.capacities[name].kv_tokens
            for name, state in states.items()
            if state is ReplicaState.READY and not self.world.engines[name]
        ]
        queued = [
            r.tokens
            for n, r in self.requests.items()
            if self.world.dispatcher.state(n) is RequestState.QUEUED
        ]
        # A request that fits no idle replica may be the head of the queue, and then all wait.
        assert not idle or not queued or max(queued) > max(idle)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for name in sorted(world.engines):
            if name in self.loading:
                world.load(name)
        world.add("last", Capacity(4, 1_000))
        for name in sorted(self.noticed & set(world.engines)):
            world.run_to_the_end()
            world.lose(name)
        world.run_to_the_end()
        assert set(world.ends) == set(self.requests), "a request is lost"
        posted = {post.request.name for post in world.posts}
        for name, end in world.ends.items():
            submitted = self.requests[name]
            assert self.policy.prompts[name] == (name in posted)
            if end.state is RequestState.DONE:
                assert end.ids == answer(submitted)
                if submitted.stream:
                    assert tuple(world.streams[name]) == end.ids
                assert self.policy.tokens[name] <= submitted.max_tokens
            elif end.state is RequestState.CANCELLED:
                assert name in self.cancelled
            elif end.state is RequestState.REFUSED:
                assert name in self.refused
            else:
                assert end.state is RequestState.FAILED
                assert self.crashes[name] == MAX_FAILURES or (
                    submitted.stream and not submitted.continuable
                )
        assert world.dispatcher.load.queued == 0


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=cases(300), stateful_step_count=40)
