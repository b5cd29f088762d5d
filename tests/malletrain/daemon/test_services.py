"""Services on a daemon with agents by hand: what nodes are worth, how long a start takes, and
clients that wait for a change of the members.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from malletrain.client import ClientError, operations
from malletrain.client.aio import AsyncConnection
from malletrain.client.exchange import Address
from malletrain.core.change_costs import StartCost
from malletrain.core.state import ControllerState
from malletrain.daemon.api import service_operations
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from tests.malletrain.daemon.forged import USERS, Agent, Imagined, RunningDaemon
from tests.waiting import NEVER_S, until

WAITING = 200
"""Clients that wait at the same time."""


@pytest.fixture(autouse=True)
def long_waits(monkeypatch):
    """A client may wait for as long as it likes."""
    monkeypatch.setattr(service_operations, "MAX_MEMBERS_WAIT_S", NEVER_S)


class Service:
    """A service of ann with a node, whose launcher is the test."""

    def __init__(self, folder, **spec):
        self.folder, self.machine = folder, Imagined("n0", "n1")
        self.daemon = RunningDaemon(folder, self.machine)
        fields = {"mode": "service", "nproc_per_node": 1, "goal": "throughput"}
        # With a minimum of one it might start on the first node alone, and rest there.
        fields |= {"min_nodes": 2, "max_nodes": 2}
        fields |= {"curve": {"1": 10.0, "2": 20.0}, **spec}
        self.job = self.daemon.submit("ann", **fields)
        leases = until(lambda: len(self.machine.of("ann")) == 2 and self.machine.of("ann"), "both")
        self.agents = [Agent(self.daemon, lease) for lease in leases]
        for agent in self.agents:
            agent.hello()
        for agent in self.agents:
            agent.hear(messages.Assign)
        with self.daemon.client("ann") as client:
            client.call("scale", {"job": self.job, "min_nodes": 1, "max_nodes": 2})

    def say(self, index=0, *, loading=False, start_s=None, address="here"):
        phase = messages.Assignment(
            self.job, "ready", 0, (), address, loading=loading, start_s=start_s
        )
        self.agents[index].say(messages.Phase(phase))

    @property
    def record(self):
        return self.daemon.components.state.controller.jobs[self.job]

    def worth(self, *args, user="ann", **more):
        with self.daemon.client(user) as client:
            return client.do(operations.worth(self.job, *args, **more))

    def members(self, user="ann", **more):
        with self.daemon.client(user) as client:
            return client.members(self.job, **more)

    def after(self, view, act):
        """The answer to a client that waits with the version of ``view`` while ``act`` happens."""
        waiting = self.daemon.components.message_router.long_polls
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self.members, since=view.version, wait_s=NEVER_S)
            until(lambda: waiting or answer.done(), "it waits")
            assert not answer.done(), "nothing has changed yet"
            act()
            return answer.result()

    def restart(self):
        """Another daemon, to which the agents report."""
        leases = [agent.lease for agent in self.agents]
        self.close()
        self.daemon = RunningDaemon(self.folder, self.machine)
        self.agents = [Agent(self.daemon, lease) for lease in leases]
        for agent in self.agents:
            agent.hello(assignment=messages.Assignment(self.job, "ready", 0, (), "here"))
        handlers = self.daemon.components.agent_handlers
        until(lambda: handlers.adopting is None, "the job is adopted")

    def close(self):
        for agent in self.agents:
            agent.close()
        self.daemon.stop()


@pytest.fixture
def service(tmp_path):
    service = Service(tmp_path)
    yield service
    service.close()


def values_events(service, kind=EventKind.NODES_VALUED):
    return [event for event in service.daemon.events() if event.kind == kind]


def test_members_have_the_forecasts_of_their_nodes(tmp_path, monkeypatch):
    forecasts = {"n0": 600.0}
    monkeypatch.setattr(ControllerState, "lasts_s", lambda _, node: forecasts.get(node))
    with closing(Service(tmp_path)) as service:
        for index in range(2):
            service.say(index)
        view = until(lambda: (v := service.members()) and len(v.members) == 2 and v, "both")
        assert {m.node: m.expected_remaining_s for m in view.members} == {"n0": 600.0, "n1": None}


def test_its_owner_values_nodes_and_the_audit_log_says_so(service):
    sentence = service.worth({1: 30.0, 2: 70.0})
    assert "1 at 30, 2 at 70" in sentence
    assert service.record.curve.points == ((1, 30.0), (2, 70.0))
    service.worth({1: 30.0, 2: 70.0})
    (event,) = values_events(service)  # the second changed nothing
    assert (event.job, event.data["by"]) == (service.job, "ann")
    assert event.data["values"] == {"1": 30.0, "2": 70.0}
    service.restart()
    assert service.record.curve.points == ((1, 30.0), (2, 70.0))
    assert service.members().values == {1: 30.0, 2: 70.0}


def test_a_worthless_service_gives_its_nodes_back_and_asks_again(service):
    service.say()
    assert "worth nothing" in service.worth({1: 0.0})
    until(lambda: service.record.nodes == (), "it has no nodes")
    with service.daemon.client("ann") as client:
        view = client.job(service.job).job
    assert (view.state, view.reason) == ("suspended", "nodes are worth nothing to it now")
    service.worth(next_each=5.0, next_count=1)
    until(lambda: len(service.record.nodes) == 1, "one node, as it asked for")


def test_a_service_that_is_submitted_worthless_gets_no_node(tmp_path):
    machine = Imagined("n0", "n1")
    daemon = RunningDaemon(tmp_path, machine)
    fields = {"mode": "service", "nproc_per_node": 1, "goal": "throughput", "max_nodes": 2}
    job = daemon.submit("ann", curve={"1": 0.0}, **fields)
    view = daemon.job(job)
    assert (view.nodes, view.reason) == ((), "nodes are worth nothing to it now")
    # Leases are taken as their users: bob, who comes later, has both nodes, and ann never had one.
    daemon.submit("bob", min_nodes=2, max_nodes=2)
    until(lambda: len(machine.of("bob")) == 2, "bob has all nodes")
    assert {request.owner for request in machine.requests.values()} == {"bob"}
    daemon.stop()
    again = RunningDaemon(tmp_path, machine)
    assert again.job(job).reason == "nodes are worth nothing to it now"
    again.stop()


def test_the_next_nodes_add_to_those_it_has(service):
    until(lambda: len(service.record.nodes) == 2, "it has both")
    service.worth(next_each=5.0, next_count=3)
    assert service.record.curve.points == ((1, 10.0), (2, 20.0), (5, 35.0))


@pytest.mark.parametrize("user", ["bob", "olga"])  # olga is an operator
def test_nobody_else_values_its_nodes(service, user):
    with pytest.raises(ClientError, match="belongs to ann; only its owner"):
        service.worth({1: 1e6}, user=user)
    assert service.record.curve.points == ((1, 10.0), (2, 20.0))
    assert values_events(service) == []


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "Say either"),
        ({"values": {1: 1.0}, "next_each": 1.0}, "Say either"),
        ({"values": {}}, "name 1 to 64"),
        ({"values": dict.fromkeys(range(1, 70), 1.0)}, "name 1 to 64"),
        ({"values": {0: 1.0}}, "sizes start at 1"),
        ({"values": {200000: 1.0}}, "200000 nodes; 100000 is the most"),
        ({"values": {1: -1.0}}, "0 or more"),
        ({"values": {1: float("nan")}}, "finite"),
        ({"values": {1: 1e16}}, "1e\\+15 is the most"),
        ({"values": [1]}, "malformed"),
        ({"next_each": -1.0}, "0 or more, not -1"),
        ({"next_each": float("inf")}, "finite number"),
        ({"next_each": 1.0, "next_count": 0}, "1 to 100,000, not 0"),
        ({"next_each": 1.0, "next_count": 1.5}, "1 to 100,000, not 1.5"),
        ({"values": {1: 1.0}, "expires_s": 0.0}, "after 1 s at least"),
        ({"values": {1: 1.0}, "expires_s": 1e12}, "a year at most"),
    ],
)
def test_wrong_values_are_refused_in_a_sentence(world, params, says):
    with world.daemon.client("ann") as client, pytest.raises(ClientError, match=says):
        client.call("worth", {"job": world.job, **params})
    assert world.record.curve.points == ((1, 10.0), (2, 20.0))


@pytest.mark.parametrize("params", [{"since": 1}, {"since": "x" * 301}, {"wait_s": float("nan")}])
def test_a_wait_that_makes_no_sense_is_refused(world, params):
    with world.daemon.client("ann") as client, pytest.raises(ClientError) as refused:
        client.call("members", {"job": world.job, **params})
    assert refused.value.code == "usage"


def test_a_service_that_waits_for_another_job_has_a_version(world):
    """A client would take an empty one for its end."""
    fields = {"mode": "service", "nproc_per_node": 1, "goal": "throughput", "curve": {"1": 1.0}}
    waits = world.daemon.submit("ann", name="waits", after=(world.job,), **fields)
    with world.daemon.client("ann") as client:
        view = client.members(waits)
        assert (view.state, view.members, view.values) == ("queued", (), {1: 1.0})
        assert view.version
        with pytest.raises(ClientError, match="waits for other jobs"):
            client.do(operations.worth(waits, {1: 1.0}))
        client.cancel([waits])
        assert client.members(waits).version == ""


def test_other_jobs_have_no_values(world):
    training = world.daemon.submit("ann", name="training", min_nodes=9, max_nodes=9)
    with world.daemon.client("ann") as client:
        for operation in (operations.worth(training, {1: 1.0}), operations.members(training)):
            with pytest.raises(ClientError, match="is no service"):
                client.do(operation)
        client.cancel([training])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A service that no test changes."""
    service = Service(tmp_path_factory.mktemp("services"))
    yield service
    service.close()


def test_values_lapse_unless_they_are_renewed(service):
    service.worth({1: 40.0, 2: 50.0})
    service.worth({1: 1.0}, expires_s=NEVER_S)
    view = service.members()
    assert view.values == {1: 1.0}
    assert 0.0 < view.values_expire_in_s <= NEVER_S
    service.restart()
    assert service.members().values == {1: 1.0}, "the limit outlives the daemon"
    service.worth({1: 2.0}, expires_s=1.0)
    until(lambda: service.members().values == {1: 40.0, 2: 50.0}, "the last ones without a limit")
    assert service.members().values_expire_in_s is None
    until(lambda: service.record.curve.at(2) == 50.0, "they count in plans")
    (lapsed,) = values_events(service, EventKind.VALUES_LAPSED)
    assert lapsed.data["values"] == {"1": 40.0, "2": 50.0}


def test_values_of_its_own_process_lapse_too(service):
    service.agents[0].say(messages.Worth(service.job, {1: 80.0}, NEVER_S))
    until(lambda: service.record.curve.at(2) == 80.0, "they count")
    service.agents[0].say(messages.Worth(service.job, {1: 80.0}, 1.0))
    until(lambda: service.record.curve.at(2) == 20.0, "those of the submission count again")


# --- clients that wait ---


def test_a_client_hears_of_each_change_at_once(service):
    service.say(loading=True)
    until(lambda: len(service.members().members) == 1, "a member")
    view = service.members(since="of another time", wait_s=NEVER_S)  # answered at once
    assert [m.loading for m in view.members] == [True]
    view = service.after(view, lambda: service.say(start_s=3.0))
    assert [m.loading for m in view.members] == [False]
    view = service.after(view, lambda: service.say(1))
    assert len(view.members) == 2
    view = service.after(view, lambda: service.worth({2: 30.0}))
    assert view.values == {2: 30.0}
    view = service.after(view, lambda: service.agents[1].say(messages.Leaving(20.0)))
    assert [m.gone_in_s is not None for m in view.members] == [False, True]
    with service.daemon.client("ann") as client:
        view = service.after(view, lambda: client.cancel([service.job]))
    assert (view.members, view.version) == ((), "")
    assert view.state == "cancelled"
    assert service.members(since="", wait_s=NEVER_S).version == "", "it has ended: no wait"


def test_many_waiting_clients_block_nobody(service):
    """All hear of one change, on one connection each of which waits; others are answered
    meanwhile.
    """
    service.say()
    until(lambda: len(service.members().members) == 1, "a member")
    version = service.members().version
    pair, running = USERS["olga"], service.daemon.daemon  # an operator: no limit of requests
    address = Address(
        running.endpoint,
        running.keys.server.public.encode(),
        pair.public.encode(),
        pair.secret.encode(),
        "",
    )

    async def ask():
        connections = [AsyncConnection(address) for _ in range(4)]
        operation = operations.members(service.job, since=version, wait_s=NEVER_S)
        waiting = [asyncio.create_task(connections[i % 4].do(operation)) for i in range(WAITING)]
        router = service.daemon.components.message_router
        await asyncio.to_thread(until, lambda: len(router.long_polls) == WAITING, "all wait")
        for _ in range(20):  # answered while all the others wait
            await connections[0].do(operations.status())
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(service.worth, {2: 33.0})
        views = await asyncio.gather(*waiting)
        for connection in connections:
            await connection.close()
        return views

    views = asyncio.run(ask())
    assert [view.values for view in views] == [{2: 33.0}] * WAITING
    assert {view.key for view in views} == {""}, "the key is the owner's"
    assert not service.daemon.components.message_router.long_polls


# --- start costs ---


@pytest.fixture
def measured(tmp_path):
    service = Service(tmp_path, start_cost_measured=True, start_cost_s=60.0)
    yield service
    service.close()


def test_a_measured_start_is_kept_and_counts(measured):
    assert measured.record.start == StartCost(60.0)
    measured.say(loading=True)
    measured.say(start_s=170.0)
    until(lambda: measured.record.start.expected_s("default") == 170.0, "it counts")
    measured.say(start_s=170.0)  # the same start, reported again
    measured.say(1, start_s=190.0)
    until(lambda: measured.record.start.expected_s("default") == 180.0, "the median of two")
    assert measured.record.start.assumed_s == 60.0
    state = measured.daemon.components.state
    profiling = state.config.profiling.model_copy(update={"enabled": True})
    state.config = state.config.model_copy(update={"profiling": profiling})
    with measured.daemon.client("ann") as client:
        shown = client.job(measured.job).profile
    assert (shown.up_s, shown.down_s, shown.start_s) == (1.0, 1.0, 180.0)
    ready = values_events(measured, EventKind.MEMBER_READY)
    assert [event.data["start_s"] for event in ready] == [170.0, 190.0]
    measured.restart()
    assert measured.record.start == StartCost(60.0, {"default": 180.0})
    assert measured.record.start.expected_s("fat") == 180.0, "not measured there: as elsewhere"


def test_a_stated_start_is_not_replaced_by_a_measured_one(tmp_path):
    service = Service(tmp_path, start_cost_s=60.0)
    try:
        assert service.record.start == StartCost(60.0)
        service.say(start_s=170.0)
        until(lambda: values_events(service, EventKind.MEMBER_READY), "it is measured")
        assert service.record.start == StartCost(60.0)
    finally:
        service.close()
