"""Gap lifetimes from the site's file to the node: the daemon is configured to foretell, a machine
whose gaps last a minute is polled, and the node of a job hears how soon it will lose one.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from malletrain.config.model import parse_config
from malletrain.protocol import messages
from scavenger.batch.gap_memory import GapMemory
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

GAP_S, POLL_S = 60.0, 20.0


class Restless(Imagined):
    """A machine whose nodes were idle for a minute and busy for one, again and again."""

    def __init__(self, *nodes, foretells):
        super().__init__(*nodes)
        self.memory = GapMemory(None, foretells=foretells)
        start = time.time() - 60 * 2 * GAP_S
        for poll in range(int(60 * 2 * GAP_S / POLL_S)):
            idle = (poll * POLL_S) % (2 * GAP_S) < GAP_S
            self.memory.update(nodes if idle else (), start + poll * POLL_S)

    def poll(self):
        # A leased node is in its gap.
        self.memory.update(self.nodes, time.time())
        return replace(super().poll(), foretold=self.memory.foretold)


@pytest.fixture
def start(tmp_path):
    running, agents = [], []

    def begin(lifetimes):
        section = f"\n[gaps]\nlifetimes = {str(lifetimes).lower()}\n"
        machine = Restless("n0", "n1", foretells=parse_config(section_of(section)).gaps.lifetimes)
        daemon = RunningDaemon(tmp_path, machine, allocation=section)
        running.append(daemon)
        job = daemon.submit("ann", max_nodes=1)
        [lease] = until(lambda: machine.of("ann"), "ann has a lease")
        agents.append(Agent(daemon, lease))
        agents[-1].hello()
        agents[-1].work(job)
        at = time.time()
        agents[-1].say(messages.Progress(job, 1, 0, 77, 8.0, 1, 8.0, at, at))
        return daemon, agents[-1], job

    yield begin
    for agent in agents:
        agent.close()
    for daemon in running:
        daemon.stop()


def section_of(section):
    return f'[scheduler]\nkind = "slurm"\n{section}'


def test_a_site_that_foretells_tells_the_node_of_a_job_how_soon_it_loses_it(start):
    daemon, agent, job = start(lifetimes=True)
    message = agent.hear(messages.ExpectLoss)
    assert message.job == job
    assert message.in_s < 4 * GAP_S
    settings = daemon.service.core.controller.settings.planning
    assert settings.look_ahead_s == settings.t_fwd_s


def test_a_site_that_does_not_expects_nothing(start):
    daemon, _, job = start(lifetimes=False)
    until(lambda: daemon.job(job).state == "running", "the job runs")
    assert daemon.service.core.controller.settings.planning.look_ahead_s is None
    assert all(n.info.cohort is None for n in daemon.service.core.controller.nodes.values())
