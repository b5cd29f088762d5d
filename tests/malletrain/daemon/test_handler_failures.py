"""A defect of ours that a message meets: it costs that message, and nobody's job."""

from __future__ import annotations

import contextlib
import weakref

import pytest

from malletrain.client import ClientError
from malletrain.daemon.site.handler_failures import (
    MAX_RESTARTS,
    MEMORY_S,
    REFUSAL_S,
    HandlerFailures,
)
from malletrain.daemon.site.metrics import Metrics
from malletrain.protocol import messages, wire
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


def broken(*args, **kwargs):
    raise ZeroDivisionError("nobody thought of this")


class World:
    """Ann's job, at work on one node."""

    def __init__(self, folder):
        self.machine = Imagined("n0")
        self.daemon = RunningDaemon(folder, self.machine)
        self.job = self.daemon.submit("ann")
        [self.lease] = until(lambda: self.machine.of("ann"), "ann has a lease")
        self.agent = Agent(self.daemon, self.lease)
        self.agent.hello()
        self.agent.work(self.job)
        until(lambda: self.daemon.job(self.job).state == "running", "the job runs")
        self.running = messages.Assignment(self.job, "running", 1)

    def failures(self):
        return [e for e in self.daemon.events() if e.kind == "message-failed"]

    def begun_anew(self, components):
        return until(lambda: self.daemon.components is not components, "the daemon begins anew")

    def close(self):
        self.agent.close()
        self.daemon.stop()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


def test_a_message_that_tears_a_step_costs_itself_and_the_job_goes_on(world):
    components = world.daemon.components
    components.state.runs[world.job].rounds.drained = broken
    world.agent.say(messages.Drained(world.job, world.running.generation, True))
    world.begun_anew(components)
    world.agent.hear(messages.WhoAreYou)
    world.agent.hello(assignment=world.running)
    world.agent.hear(messages.Welcome)
    until(
        lambda: [e for e in world.daemon.events() if e.kind == "job-adopted"], "the job is adopted"
    )
    [failure] = world.failures()
    assert "Drained of the agent of lease" in failure.sentence
    assert (
        "ZeroDivisionError: nobody thought of this (test_handler_failures.py, line"
        in failure.sentence
    )
    assert "taken over 1 unfinished job and 1 lease again" in failure.sentence
    assert world.daemon.job(world.job).state == "running"
    assert world.machine.of("ann") == [world.lease]
    assert not [e for e in world.daemon.events() if e.kind in ("node-lost", "lease-ended")]
    assert len([e for e in world.daemon.events() if e.kind == "round-formed"]) == 1
    assert world.daemon.metric("failed_messages_total", sender="agent") == 1
    with world.daemon.client("olga") as client:
        assert "One message could not be handled" in client.status().handler_failures
    with world.daemon.client("ann") as client:
        assert not client.status().handler_failures


def test_a_message_that_fails_outside_of_a_step_costs_nothing_else(world):
    components = world.daemon.components
    components.state.runs[world.job].monitor.mark = broken
    mark = messages.Mark(world.job, world.running.generation, 0, "import", 1.0)
    world.agent.say(mark)
    [failure] = until(world.failures, "it is told")
    assert "It had no other effect" in failure.sentence
    world.agent.say(messages.Heartbeat("b"))
    world.agent.hear(messages.Alive)
    assert world.daemon.components is components


def test_where_even_that_cannot_be_written_down_the_parts_are_made_anew(world):
    components = world.daemon.components
    audit, record = components.state.audit, components.state.audit.record

    def once(*arguments, **options):
        audit.record = record
        broken()

    components.state.runs[world.job].monitor.mark = broken
    audit.record = once
    world.agent.say(messages.Mark(world.job, world.running.generation, 0, "import", 1.0))
    world.begun_anew(components)
    assert world.daemon.job(world.job).state == "running"


def test_a_step_that_was_saved_and_could_not_be_told_has_the_parts_made_anew(world):
    components = world.daemon.components
    flush = components.state.outbox.flush

    def once():
        if components.state.runs[world.job].row.state != "cancelled":
            return flush()  # the messages are of an earlier step
        components.state.outbox.flush = flush
        return broken()

    with world.daemon.client("ann") as client, contextlib.suppress(ClientError):
        components.state.outbox.flush = once
        client.cancel(world.job)
    world.begun_anew(components)
    assert components.transactions.torn
    until(lambda: world.daemon.job(world.job).state == "cancelled", "what was saved holds")


def test_what_fails_when_a_turn_is_told_is_found_out_message_by_message(world, monkeypatch):
    encode, components = wire.encode, world.daemon.components

    def broken_for_alive(message, *most):
        return broken() if isinstance(message, messages.Alive) else encode(message, *most)

    monkeypatch.setattr(wire, "encode", broken_for_alive)
    world.agent.say(messages.Heartbeat("b"))
    world.begun_anew(components)
    assert not world.daemon.metric("failed_messages_total", sender="agent"), (
        "a turn has many messages"
    )
    world.agent.hear(messages.WhoAreYou)
    world.agent.hello(assignment=world.running)
    world.agent.hear(messages.Welcome)
    world.agent.say(messages.Heartbeat("b"))
    until(
        lambda: world.daemon.metric("failed_messages_total", sender="agent"),
        "it is known which it is",
    )
    assert "Heartbeat of the agent of lease" in world.failures()[-1].sentence
    assert world.daemon.job(world.job).state == "running"


def test_who_sends_it_again_and_again_is_not_heard_in_it_but_in_all_else(world):
    world.daemon.components.state.runs[world.job].monitor.mark = broken
    mark = messages.Mark(world.job, world.running.generation, 0, "import", 1.0)
    for _ in range(3):
        world.agent.say(mark)
    sentence = world.agent.hear(messages.Error).sentence
    assert "failed to handle 2 of your messages Mark" in sentence
    assert world.daemon.metric("failed_messages_total", sender="agent") == 2
    world.agent.say(messages.Heartbeat("b"))
    world.agent.hear(messages.Alive)


def test_a_request_that_tears_a_step_can_be_made_again(world):
    components = world.daemon.components
    with world.daemon.client("ann") as client:
        store = components.state.store
        change_job = store.change_job

        def once(*arguments, **options):
            store.change_job = change_job
            broken()

        store.change_job = once
        with pytest.raises(ClientError) as failed:
            client.cancel([world.job])
        assert failed.value.code == "internal"
        world.begun_anew(components)
        assert world.daemon.job(world.job).state == "running"
    assert world.daemon.metric("failed_messages_total", sender="client") == 1
    assert "cancel of the client of ann" in world.failures()[0].sentence


def test_leases_of_a_step_that_was_not_saved_are_not_asked_for(tmp_path):
    machine = Imagined("n0")
    daemon = RunningDaemon(tmp_path, machine)
    components, commanded = daemon.components, []
    until(lambda: components.state.gaps, "the idle node is seen")
    take, keep = components.lease_actions.take, components.state.shares.keep

    def taken(nodes, owner):
        take(nodes, owner)
        commanded.append(nodes)

    def fails_then(*args, **kwargs):
        keep(*args, **kwargs)
        if commanded:
            broken()

    components.lease_actions.take, components.state.shares.keep = taken, fails_then
    with contextlib.suppress(ClientError):  # the step that fails may be that of the request
        daemon.submit("ann", key="again")
    until(lambda: daemon.components is not components, "the daemon begins anew")
    job = daemon.submit("ann", key="again")
    until(lambda: machine.of("ann"), "ann has a lease")
    lease_ids = [row.id for row in daemon.components.state.store.list_leases()]
    assert commanded
    assert sorted(machine.requests) == lease_ids == sorted(machine.of("ann"))
    assert daemon.job(job).state == "queued"
    daemon.stop()


class Hands:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_sender_is_heard_again_after_a_while_and_forgiven_after_a_longer_one():
    clock = Hands()
    handler_failures, error = HandlerFailures(Metrics(), clock), ValueError("x" * 5000)
    assert len(handler_failures.of_message("client:ann", "submit", error).sentence) < 500
    assert not handler_failures.refusal("client:ann", "submit")
    handler_failures.of_message("client:ann", "submit", error)
    assert "for 60 s" in handler_failures.refusal("client:ann", "submit")
    assert not handler_failures.refusal("client:bob", "submit")
    assert not handler_failures.refusal("client:ann", "cancel")
    clock.now = REFUSAL_S
    assert not handler_failures.refusal("client:ann", "submit")
    handler_failures.of_message("client:ann", "submit", error)
    clock.now += 2 * REFUSAL_S - 1.0
    assert handler_failures.refusal("client:ann", "submit")
    clock.now += MEMORY_S + 2.0
    handler_failures.of_message("client:ann", "submit", error)
    assert not handler_failures.refusal("client:ann", "submit")


def test_a_daemon_that_fails_by_itself_begins_anew_a_few_times_only():
    clock = Hands()
    handler_failures = HandlerFailures(Metrics(), clock)
    for _ in range(MAX_RESTARTS):
        assert handler_failures.may_begin_anew(ValueError())
    assert not handler_failures.may_begin_anew(ValueError())
    assert handler_failures.doubtful()
    clock.now = MEMORY_S
    assert not handler_failures.doubtful()
    assert handler_failures.may_begin_anew(ValueError())


def test_of_the_parts_that_a_message_tore_nothing_stays(world):
    components = world.daemon.components
    before = [
        weakref.ref(part)
        for part in (
            components,
            components.state,
            components.transactions,
            components.agent_handlers,
        )
    ]
    components.state.runs[world.job].rounds.drained = broken
    del (
        components
    )  # the next ones leave out of the search for garbage what is there when they begin
    world.agent.say(messages.Drained(world.job, world.running.generation, True))
    until(lambda: world.daemon.components is not before[0](), "the daemon begins anew")
    world.agent.hear(messages.WhoAreYou)
    assert not [part for part in before if part() is not None]
