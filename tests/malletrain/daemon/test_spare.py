"""A node that no job needs any more goes when the job that leaves it has let go of it, and not
sooner: it may train on while its joiners come up, and save what is done.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from malletrain.daemon.engine.agents import Agents, LeasedAgent
from malletrain.daemon.site import settings
from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow

AT_ONCE = 'release_after = "0 s"\nlease_wait = "1 h"\n[jobs]\ndrain_timeout = "1 h"'
SOON = AT_ONCE.replace('drain_timeout = "1 h"', 'drain_timeout = "1 s"\nstop_grace = "1 s"')
SOON += '\nlog_wait = "1 s"'


def test_a_spare_node_that_a_job_gets_after_all_is_kept():
    agents = Agents(lambda peer, message: True)
    agent = LeasedAgent("l1", "n1", b"1", "n1", 0.0, holds="j1", releasing=True, spare=True)
    agents.add(agent)
    spec = messages.JobSpec("job", "", "train.py", "/", "python")
    agents.assign("n1", messages.Assign("j2", spec))
    agents.released(agent, "j1")
    assert (agent.holds, agent.spare) == ("j2", False)


def is_spare(daemon, node):
    agent = daemon.components.state.agents.on(node)
    return agent is not None and agent.spare


@pytest.fixture
def pair(tmp_path):
    """Make a daemon whose job trains on two nodes: the machine, the daemon, the job, and its
    agents in the order of ranks.
    """
    with ExitStack() as stack:

        def make(allocation):
            machine = Imagined("n0", "n1")
            daemon = RunningDaemon(tmp_path, machine, allocation=allocation)
            stack.callback(daemon.stop)
            job = daemon.submit("ann", min_nodes=2, max_nodes=2)
            until(lambda: len(machine.of("ann")) == 2, "ann has two leases")
            agents = [stack.enter_context(closing(Agent(daemon, x))) for x in machine.of("ann")]
            for agent in agents:
                agent.hello()
            for agent in agents:
                agent.hear(messages.Assign)
                agent.say(messages.Phase(messages.Assignment(job, "ready")))
            members = until(
                lambda: daemon.components.state.runs[job].row.members, "a round is formed"
            )
            first, second = sorted(agents, key=lambda a: members.index(a.node))
            first.say(messages.StoreUp(job, 1, "127.0.0.1", 5000))
            for agent in agents:
                agent.say(messages.Phase(messages.Assignment(job, "running", 1)))
            until(lambda: daemon.components.state.runs[job].rounds.stage == "running", "it trains")
            return machine, daemon, job, first, second

        yield make


def test_a_peer_of_a_node_that_leaves_may_save_before_its_lease_is_given_back(pair):
    machine, daemon, job, first, second = pair(AT_ONCE)
    second.say(messages.Leaving(3600.0))
    drain = first.hear(messages.Drain)
    until(lambda: is_spare(daemon, first.node), "no job needs the node")
    assert first.lease in machine.leases
    first.say(messages.Drained(job, 1, True, "", drain.number))
    first.hear(messages.Release)  # a Goodbye before would have ended the worker unsaved
    assert first.lease in machine.leases
    first.say(messages.Released(job))
    first.hear(messages.Goodbye)
    first.say(messages.LogsShipped(job))
    until(lambda: first.lease not in machine.leases, "the lease is given back")


def test_a_spare_node_that_its_job_does_not_leave_is_given_back_all_the_same(pair, monkeypatch):
    """A worker resists SIGKILL, on a file system that hangs, say: the agent lives on."""
    monkeypatch.setattr(settings, "MOVING_S", 0.1)
    machine, _, job, first, second = pair(SOON)
    second.say(messages.Leaving(3600.0))
    drain = first.hear(messages.Drain)
    first.say(messages.Drained(job, 1, True, "", drain.number))
    first.hear(messages.Release)
    until(lambda: first.lease not in machine.leases, "the lease is given back")
