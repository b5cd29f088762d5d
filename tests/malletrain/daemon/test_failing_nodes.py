"""A node on which one job after another fails is left alone, and an operator can take that back."""

from __future__ import annotations

from contextlib import suppress

import pytest

from malletrain.client import ClientError
from malletrain.core.unleased_nodes import MIN_FAILED_JOBS
from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

RAISED = (messages.Failure(0, 1, 1.0, "RuntimeError: an error of the bus"),)


class World:
    """A job of ann's trains on one node; jobs of the same script come to the other one."""

    def __init__(self, folder):
        self.folder = folder
        self.machine = Imagined("n0", "n1")
        self.daemon = RunningDaemon(folder, self.machine)
        self.agents = []
        job = self.daemon.submit("ann")
        agent = self.agent()
        agent.work(job)
        agent.say(messages.Progress(job, 1, 0, 7, 8.0, 1, 8.0, 1.0, 2.0))
        until(lambda: self.daemon.job(job).samples, "its script works")
        self.bad = ""

    def agent(self):
        """That of the next lease."""
        until(lambda: len(self.machine.of("ann")) > len(self.agents), "another lease is asked for")
        self.agents.append(Agent(self.daemon, self.machine.of("ann")[-1]))
        self.agents[-1].hello()
        return self.agents[-1]

    def fails(self, end=True):
        """One more job comes to the other node, and fails there."""
        job = self.daemon.submit("ann")
        agent = self.agents[1] if self.bad else self.agent()
        self.bad = agent.node
        agent.work(job)
        failed = messages.Assignment(job, "failed", 1, RAISED)
        agent.say(messages.Phase(failed))
        until(lambda: self.events_of("workers-failed", job), "it is noticed")
        if end:
            with self.daemon.client("ann") as client:
                client.cancel([job])
            agent.hear(messages.Release)
            agent.say(messages.Released(job))
            agent.say(messages.LogsShipped(job))
            until(lambda: not self.daemon.job(job).nodes, "it is gone")

    def events_of(self, kind, job=None):
        return [e for e in self.daemon.events() if e.kind == kind and job in (None, e.job)]

    def state(self):
        with self.daemon.client("olga") as client:
            return {view.node: view.state for view in client.nodes()}[self.bad]

    def close(self):
        for agent in self.agents:
            agent.close()
        self.daemon.stop()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    with suppress(AssertionError):
        world.close()


def test_a_node_on_which_good_jobs_fail_is_left_alone_until_somebody_says_that_it_is_well(world):
    for _ in range(MIN_FAILED_JOBS - 1):
        world.fails()
    assert not world.events_of("node-sick")
    world.fails(end=False)
    [event] = until(lambda: world.events_of("node-sick"), "it is found out")
    assert (event.node, "3 jobs failed on it within a day" in event.sentence) == (world.bad, True)
    with world.daemon.client("ann") as client, pytest.raises(ClientError, match="operators"):
        client.call("resume", {"nodes": [world.bad]}, changes=True)
    with world.daemon.client("olga") as client:
        reply = client.call("resume", {"nodes": [world.bad]}, changes=True)
        assert reply["sentence"] == f"May be leased again: {world.bad}."
        with pytest.raises(ClientError, match="nor sick"):
            client.call("resume", {"nodes": [world.bad]}, changes=True)
    world.daemon.stop()
    world.daemon = RunningDaemon(world.folder, world.machine)
    with (
        world.daemon.client("olga") as client,
        pytest.raises(ClientError, match="nor sick"),  # a restart has not forgotten that
    ):
        client.call("resume", {"nodes": [world.bad]}, changes=True)
