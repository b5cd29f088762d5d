"""The main scheduler fails, hangs or says half of what there is, for as long as it likes: the jobs
go on, users are served, and when it is back everything goes on from where it stands.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from malletrain.protocol import messages
from scavenger.interface import SchedulerError
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

OVER = ("lease-ended", "node-lost", "node-vanished")


class Troubled(Imagined):
    """A main scheduler with ``trouble``: "", fails, hangs, or half: every other poll lacks the
    leases.
    """

    def __init__(self, *nodes):
        super().__init__(*nodes)
        self.trouble = ""
        self.polls = 0
        self.hung = 0
        self.released = threading.Event()

    def poll(self):
        self.polls += 1
        self._bear()
        result = super().poll()
        if self.trouble == "half" and self.polls % 2:
            return replace(result, leases=())
        return result

    def take(self, requests):
        self._bear()
        return super().take(requests)

    def _bear(self):
        if self.trouble == "fails":
            raise SchedulerError("slurmctld does not answer.")
        if self.trouble == "hangs":
            self.hung += 1
            assert self.released.wait(PATIENCE_S)


def test_what_fails_beside_a_poll_is_in_the_log_once(tmp_path):
    class Full(Troubled):
        def poll(self):
            return replace(super().poll(), trouble="Old outputs cannot be deleted.")

    machine = Full("n0")
    with capture_logs() as lines:
        daemon = RunningDaemon(tmp_path, machine)
        try:
            until(lambda: machine.polls >= 4, "it is polled again and again")
        finally:
            daemon.stop()
    warnings = [line for line in lines if line.get("reason") == "Old outputs cannot be deleted."]
    assert [line["log_level"] for line in warnings] == ["warning"]


@contextmanager
def training(folder):
    """A daemon, its machine, and a job that trains on a node."""
    machine = Troubled("n0", "n1")
    daemon = RunningDaemon(folder, machine)
    agent = None
    try:
        job = daemon.submit("ann")
        [lease] = until(lambda: machine.of("ann"), "ann has a lease")
        agent = Agent(daemon, lease)
        agent.hello()
        agent.work(job)
        until(lambda: daemon.job(job).state == "running", "it runs")
        yield daemon, machine, job, agent
    finally:
        machine.trouble = ""
        machine.released.set()
        if agent is not None:
            agent.close()
        daemon.stop()


def kinds(daemon):
    """What has been recorded so far."""
    return [event.kind for event in daemon.events()]


@pytest.mark.parametrize("trouble", ["fails", "hangs", "half"])
def test_while_it_is_out_of_order_jobs_go_on_and_users_are_served(tmp_path, trouble):
    with training(tmp_path) as (daemon, machine, job, agent):
        machine.trouble = trouble
        polls_before = machine.polls

        def heard():
            """The daemon hears of the agent whatever the main scheduler says."""
            agent.say(messages.Heartbeat(""))
            return True

        def in_trouble():
            return heard() and (machine.hung or machine.polls > polls_before + 10)

        until(in_trouble, "it is asked")
        second = daemon.submit("bob")
        if trouble == "fails":
            with daemon.client() as client:
                assert "slurmctld does not answer." in client.status().poll_error
            until(lambda: "scheduler-busy" in kinds(daemon), "it is told")
        assert daemon.job(job).nodes == (agent.node,)
        assert daemon.job(second).state == "queued" or trouble == "half"
        assert not [e for e in daemon.events() if e.lease == agent.lease and e.kind in OVER]
        machine.trouble = ""
        machine.released.set()
        until(lambda: heard() and machine.of("bob"), "bob has a lease when it is back")
        if trouble == "fails":
            until(lambda: "scheduler-answers" in kinds(daemon), "its end is told")
            with daemon.client() as client:
                assert client.status().poll_error == ""
        assert daemon.job(job).nodes == (agent.node,)
        assert not [e for e in daemon.events() if e.lease == agent.lease and e.kind in OVER]


def test_a_lease_that_is_gone_for_good_is_believed_to_be(tmp_path):
    with training(tmp_path) as (daemon, machine, job, agent):
        machine.give_back(tuple(machine.leases.values()))
        machine.nodes = ()
        until(lambda: daemon.job(job).nodes == (), "its node is lost")
        [event] = [e for e in daemon.events() if e.kind == "lease-ended"]
        assert (event.lease, event.node) == (agent.lease, agent.node)


def test_a_lease_whose_agent_is_not_there_yet_outlives_half_an_answer(tmp_path):
    machine = Troubled("n0", "n1")
    daemon = RunningDaemon(tmp_path, machine)
    try:
        daemon.submit("ann")
        [lease] = until(lambda: machine.of("ann"), "ann has a lease")
        machine.trouble, polls_before = "half", machine.polls
        until(lambda: machine.polls > polls_before + 6, "it is asked")
        assert machine.of("ann") == [lease], "no other was asked for, and it was not given back"
        assert not [e for e in daemon.events() if e.kind in OVER]
    finally:
        daemon.stop()
