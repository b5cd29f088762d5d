"""Agents of the version before keep their job under a new daemon, and are replaced when it ends."""

from __future__ import annotations

import msgspec
import pytest

from malletrain.protocol import messages, wire
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


class AgentOfBefore(Agent):
    """Speaks as the version before: it knows no version."""

    def say(self, message):
        body = msgspec.to_builtins(message)
        body.pop("version", None)
        self.send_raw([wire.PROTOCOL, msgspec.msgpack.encode(body)])


@pytest.fixture
def world(tmp_path):
    machine = Imagined("n0")
    daemon = RunningDaemon(tmp_path, machine)
    agents = []

    def lease(kind):
        [lease] = until(lambda: machine.of("ann"), "ann has a lease")
        agents.append(kind(daemon, lease))
        agents[-1].hello()
        return agents[-1]

    yield daemon, lease
    for agent in agents:
        agent.close()
    daemon.stop()


def test_an_agent_of_before_is_replaced_before_it_gets_a_job(world):
    daemon, lease = world
    job = daemon.submit("ann")
    old = lease(AgentOfBefore)
    old.hear(messages.Goodbye)
    until(
        lambda: not daemon.machine.of("ann") or daemon.machine.of("ann") != [old.lease], "it goes"
    )
    new = lease(Agent)
    assert new.lease != old.lease
    new.work(job)
    until(lambda: daemon.job(job).state == "running", "the job runs with an agent of this version")
    why = [e.sentence for e in daemon.events() if e.kind == "lease-released"]
    assert any("agent is of an earlier malletrain, the daemon of" in sentence for sentence in why)


def test_an_agent_of_before_that_leaves_with_a_reason_is_understood(world):
    """Agents gave one until the daemon learned the reason from the main scheduler."""
    daemon, lease = world
    job = daemon.submit("ann")
    agent = lease(Agent)
    agent.work(job)
    until(lambda: daemon.job(job).state == "running", "it runs")
    body = {"type": "leaving", "in_s": 600.0, "reason": "The main scheduler wants the node back."}
    agent.send_raw([wire.PROTOCOL, msgspec.msgpack.encode(body)])
    agents = daemon.components.state.agents
    until(lambda: agents.of_lease(agent.lease).gone_at is not None, "the notice counts")


def test_one_that_has_a_job_keeps_it_and_goes_when_that_has_left(world):
    daemon, lease = world
    job = daemon.submit("ann")
    agent = lease(Agent)
    agent.work(job)
    until(lambda: daemon.job(job).state == "running", "it runs")
    # As after a restart of the daemon: the agent says hello again, and is of the version before.
    running = messages.Assignment(job, "running", 1)
    AgentOfBefore.say(
        agent,
        messages.Hello(agent.node, agent.lease, "127.0.0.1", 1, assignment=running),
    )
    until(lambda: daemon.components.state.agents.of_lease(agent.lease).outdated, "it is known")
    assert daemon.job(job).nodes == (agent.node,)
    assert not [e for e in daemon.events() if e.kind == "lease-released"]
    with daemon.client() as client:
        client.cancel([job])
    agent.hear(messages.Release)
    agent.say(messages.Released(job))
    agent.hear(messages.Goodbye)
