"""The forecast of a loss on its way through the daemon: from the poll of a machine whose gaps last
a minute to the first node of a job.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from malletrain.core.commands import BatchAdvised, LossExpected
from malletrain.daemon.engine.decisions import Decisions
from malletrain.protocol import messages, wire
from scavenger.batch.gap_memory import GapMemory
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

GAP_S, POLL_S = 60.0, 20.0


class Agents:
    def __init__(self):
        self.messages = []

    def tell(self, node, message):
        self.messages.append((node, message))


def test_the_node_of_rank_0_hears_how_soon_a_loss_is_expected():
    agents = Agents()
    runs = {
        "j1": SimpleNamespace(rounds=SimpleNamespace(members=("n3", "n1"))),
        "j2": SimpleNamespace(rounds=SimpleNamespace(members=())),
    }
    decisions = Decisions(SimpleNamespace(runs=runs, agents=agents), None, None)
    for job in runs:
        decisions.carry_out(LossExpected(job, 450.0), 0.0)
    assert agents.messages == [("n3", messages.ExpectLoss("j1", 450.0))]


def test_the_node_of_rank_0_hears_which_batch_suits_the_nodes():
    agents = Agents()
    runs = {"j1": SimpleNamespace(rounds=SimpleNamespace(members=("n3", "n1")))}
    decisions = Decisions(SimpleNamespace(runs=runs, agents=agents), None, None)
    decisions.carry_out(BatchAdvised("j1", 512), 0.0)
    message = messages.AdviseBatch("j1", 512)
    assert agents.messages == [("n3", message)]
    assert wire.decode(wire.encode(message)) == message


def test_that_no_loss_is_expected_can_be_said():
    message = messages.ExpectLoss("j1", float("inf"))
    assert wire.decode(wire.encode(message)) == message


class Restless(Imagined):
    """A machine whose nodes were idle for a minute and busy for one, again and again."""

    def __init__(self, *nodes):
        super().__init__(*nodes)
        self.memory = GapMemory(None)
        start = time.time() - 60 * 2 * GAP_S
        for poll in range(int(60 * 2 * GAP_S / POLL_S)):
            idle = (poll * POLL_S) % (2 * GAP_S) < GAP_S
            self.memory.update(nodes if idle else (), start + poll * POLL_S)

    def poll(self):
        # A leased node is in its gap.
        now = time.time()
        self.memory.update(self.nodes, now)
        return replace(super().poll(), forecasts=self.memory.forecasts(now))


@pytest.fixture
def daemon(tmp_path):
    machine = Restless("n0", "n1")
    running = RunningDaemon(tmp_path, machine)
    yield running, machine
    running.stop()


def test_the_node_of_a_job_hears_how_soon_it_loses_it(daemon):
    running, machine = daemon
    job = running.submit("ann", max_nodes=1)
    [lease] = until(lambda: machine.of("ann"), "ann has a lease")
    agent = Agent(running, lease)
    try:
        agent.hello()
        agent.work(job)
        at = time.time()
        agent.say(messages.Progress(job, 1, 0, 77, 8.0, 1, 8.0, at, at))
        message = agent.hear(messages.ExpectLoss)
    finally:
        agent.close()
    assert message.job == job
    assert message.in_s < 4 * GAP_S
