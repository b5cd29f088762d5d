"""Whether a lease that ends was preempted or reached its time limit."""

import time
from dataclasses import replace

import pytest

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


class Limited(Imagined):
    """Its leases have a time limit."""

    limit_s = 3600.0

    def take(self, requests):
        taken = super().take(requests)
        for lease in taken:
            self.leases[lease.id] = replace(lease, ends_by=time.time() + self.limit_s)
        return taken


@pytest.mark.parametrize(
    ("limit_s", "preemptions", "kind", "word", "sentence"),
    [
        (
            3600.0,
            1,
            "node-leaving",
            "preempted",
            "The main scheduler wants the node back within 30 s.",
        ),
        (
            20.0,
            0,
            "node-expiring",
            "ended",
            "The lease ends within 30 s: its time limit is reached.",
        ),
    ],
)
def test_a_lease_at_its_time_limit_is_not_preempted(
    tmp_path, limit_s, preemptions, kind, word, sentence
):
    machine = Limited("n0")
    machine.limit_s = limit_s
    daemon = RunningDaemon(tmp_path, machine)
    agent = None
    try:
        job = daemon.submit("ann")
        [lease] = until(lambda: machine.of("ann"), "a lease")
        agent = Agent(daemon, lease)
        agent.hello()
        agent.work(job)
        until(
            lambda: lease in daemon.components.state.lease_ends,
            "a poll reports the end of its time limit",
        )
        agent.say(messages.Leaving(30.0))
        until(lambda: kind in {e.kind for e in daemon.events()}, "the notice is handled")
        assert [e.sentence for e in daemon.events() if e.kind == kind] == [sentence]
        with daemon.client() as client:
            assert client.status().preemptions == preemptions
        machine.nodes = ()  # no further lease
        machine.leases.clear()
        until(lambda: "lease-ended" in {e.kind for e in daemon.events()}, "the lease ends")
        assert daemon.metric("leases_ended_total", reason=word) == 1
        assert not daemon.components.state.lease_ends
    finally:
        if agent is not None:
            agent.close()
        daemon.stop()
