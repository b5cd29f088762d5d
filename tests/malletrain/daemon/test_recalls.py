"""What a daemon does when a poll shows that the main scheduler takes a lease back."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from malletrain.client import operations
from malletrain.protocol import messages
from malletrain.protocol.farm import FarmSpec
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow

GRACE_S = 3600.0


class Site:
    """A daemon with one lease, and a farm that wants its node."""

    def __init__(self, folder):
        self.machine = Imagined("n0")
        self.daemon = RunningDaemon(folder, self.machine)
        farm = FarmSpec(("run", "{x}"), columns=("x",), total=2, log="{index}.log", cpus=1)
        self.job = self.daemon.submit("ann", farm=farm, mode="farm", goal="throughput")
        with self.daemon.client("ann") as client:
            client.do(operations.add_tasks(self.job, 0, [["a"], ["b"]]))
        [self.lease] = until(lambda: self.machine.of("ann"), "a lease")
        self.agent = Agent(self.daemon, self.lease)

    def take_back(self, leave_in_s=None):
        """The main scheduler preempts the lease, by the next poll."""
        now = time.time()
        leave_by = None if leave_in_s is None else now + leave_in_s
        lease = self.machine.leases[self.lease]
        self.machine.leases[self.lease] = replace(lease, gone_at=now + GRACE_S, leave_by=leave_by)

    def member(self):
        """The lease has an agent, and the job runs there."""
        self.agent.hello()
        self.agent.hear(messages.Assign)
        self.agent.say(messages.Phase(messages.Assignment(self.job, "ready")))
        generation = self.agent.hear(messages.Round).generation
        self.agent.say(messages.Phase(messages.Assignment(self.job, "running", generation)))

    def time_left_s(self):
        """The time that the job has left on its node, by its next view."""
        while True:
            [own] = self.agent.hear(messages.Round).members
            if own.gone_in_s is not None:
                return own.gone_in_s

    def notices(self):
        return [e.sentence for e in self.daemon.events() if e.kind == "node-leaving"]

    def until_polled(self):
        recalls = self.daemon.components.state.recalls
        until(lambda: self.lease in recalls, "a poll shows it")

    def close(self):
        self.agent.close()
        self.daemon.stop()


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.close()


def test_a_lease_that_is_taken_back_before_its_agent_came_gets_no_job(site):
    """The main scheduler's signal came while the lease was starting, and nobody heard it."""
    site.take_back()
    site.until_polled()
    site.agent.hello()
    assert isinstance(site.agent.hear((messages.Assign, messages.Goodbye)), messages.Goodbye)
    assert len(site.notices()) == 1


def test_the_job_leaves_a_node_whose_agent_did_not_hear_the_signal(site):
    site.member()
    site.take_back()
    assert 0.9 * GRACE_S < site.time_left_s() < GRACE_S
    site.agent.say(messages.Leaving(GRACE_S))
    site.until_polled()
    assert len(site.notices()) == 1


def test_a_notice_for_a_job_that_has_waited_leaves_less_time(site):
    site.member()
    state = site.daemon.components.state
    site.take_back(leave_in_s=600.0)
    site.until_polled()
    assert 0 < site.time_left_s() < 600.0
    assert 0 < state.agents.of_lease(site.lease).gone_at - time.time() <= 600.0


def test_a_job_that_leaves_already_is_hastened(site):
    site.member()
    site.agent.say(messages.Leaving(GRACE_S))
    assert site.time_left_s() > 0.9 * GRACE_S
    site.take_back(leave_in_s=600.0)
    assert 0 < site.time_left_s() < 600.0
    agent = site.daemon.components.state.agents.of_lease(site.lease)
    gone_at = agent.gone_at
    site.take_back(leave_in_s=1200.0)
    polls = site.daemon.components
    until(
        lambda: (polls.state.recalls[site.lease].leave_by or 0.0) > gone_at + 300.0, "another poll"
    )
    assert agent.gone_at == gone_at, "it never gets more time"
    assert len(site.notices()) == 1


def test_the_end_of_a_time_limit_is_no_preemption(site):
    site.member()
    lease = site.machine.leases[site.lease]
    ends_by = time.time() + GRACE_S
    site.machine.leases[site.lease] = replace(lease, ends_by=ends_by)
    ends = site.daemon.components.state.lease_ends
    until(lambda: site.lease in ends, "the limit is known")
    site.machine.leases[site.lease] = replace(lease, gone_at=ends_by)
    marker = replace(lease, id="other", node="n9")
    site.machine.leases["other"] = marker
    until(lambda: site.daemon.components.leases.last_poll.leases[-1:] == (marker,), "a poll")
    assert not site.notices()
