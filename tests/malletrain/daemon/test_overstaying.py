"""A lease that was to leave and whose end was never asked for, or refused, does not hold its node
until its time limit.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from malletrain.daemon.leases import actions
from malletrain.protocol import messages
from scavenger.interface import LeaseState, SchedulerError
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until
from tests.waiting import NEVER_S

pytestmark = pytest.mark.slow

SOON = 'release_after = "0 s"\n'
WAIT = SOON + 'lease_wait = "1 s"'


class Deaf(Imagined):
    """A main scheduler that ends nothing while it is ``busy``."""

    busy = False
    begins = LeaseState.PENDING

    def __init__(self, *nodes):
        super().__init__(*nodes)
        self.releases = []

    def give_back(self, leases):
        self.releases += [lease.id for lease in leases]
        if self.busy:
            raise SchedulerError("scancel failed: try again later.")
        super().give_back(leases)


def given_up(daemon, machine):
    """A lease without an agent and without use to a job, which the daemon asked to end in vain."""
    job = daemon.submit("ann")
    [lease] = until(lambda: machine.of("ann"), "ann has a lease")
    with closing(Agent(daemon, lease)) as agent:
        agent.hello()
        agent.hear(messages.Welcome)
        machine.run(lease)
        agent.work(job)
        with daemon.client("ann") as client:
            client.cancel([job])
        agent.hear(messages.Release)
        agent.say(messages.Released(job))
        agent.hear(messages.Goodbye)
        agent.say(messages.LogsShipped(job))
        until(lambda: machine.releases, "its end was asked for")
    return lease


def test_a_release_that_was_refused_is_asked_for_again(tmp_path):
    machine = Deaf("n0")
    machine.busy = True
    daemon = RunningDaemon(tmp_path, machine, allocation=WAIT)
    try:
        lease = given_up(daemon, machine)
        until(lambda: machine.releases.count(lease) >= 2, "it was asked for again")
        machine.busy = False
        until(lambda: lease not in machine.leases, "it has ended")
        until(lambda: not daemon.components.leases.active, "the daemon knows")
    finally:
        daemon.stop()


def test_a_release_that_was_lost_with_the_daemon_is_asked_for_by_the_next(tmp_path):
    machine = Deaf("n0")
    machine.busy = True
    daemon = RunningDaemon(tmp_path, machine, allocation=SOON + 'lease_wait = "10 min"')
    try:
        lease = given_up(daemon, machine)
    finally:
        daemon.stop()
    machine.busy, machine.releases = False, []
    assert lease in machine.leases
    # nothing is heard of its agent any more
    daemon = RunningDaemon(tmp_path, machine, allocation=WAIT)
    try:
        until(lambda: lease not in machine.leases, "it has ended")
        assert machine.releases[0] == lease
        until(lambda: not daemon.components.leases.active, "the daemon knows")
    finally:
        daemon.stop()


def test_nobody_asks_for_the_end_of_a_lease_that_its_agent_ended(tmp_path, monkeypatch):
    """On PBS a ``qdel`` for a job that ended in the same moment was never answered. The other tests
    show that the daemon does ask where the agent stays.
    """
    monkeypatch.setattr(actions, "EXIT_WAIT_S", NEVER_S)
    machine = Deaf("n0")
    daemon = RunningDaemon(tmp_path, machine, allocation=SOON)
    try:
        job = daemon.submit("ann")
        [lease] = until(lambda: machine.of("ann"), "ann has a lease")
        with closing(Agent(daemon, lease)) as agent:
            agent.hello()
            agent.hear(messages.Welcome)
            machine.run(lease)
            with daemon.client("ann") as client:
                client.cancel([job])
            agent.hear(messages.Goodbye)
            agent.say(messages.LogsShipped(job))
            del machine.leases[lease]
            until(lambda: not daemon.components.leases.active, "the lease is over")
        assert machine.releases == []
    finally:
        daemon.stop()
