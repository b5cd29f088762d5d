"""Who reads that leases start and no agent reports from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.interface import LeaseState
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


class Broken(Imagined):
    """Its leases end as soon as they run, until it is mended."""

    mended = False

    def take(self, requests):
        leases = super().take(requests)
        if self.mended:
            return leases
        for lease in leases:
            del self.leases[lease.id]
        return [replace(x, state=LeaseState.ENDED, reason="its command failed") for x in leases]


def test_operators_and_the_owner_read_why_until_an_agent_reports(tmp_path):
    machine = Broken("n0", "n1")
    daemon, agent = RunningDaemon(tmp_path, machine), None

    def status(user):
        with daemon.client(user) as client:
            return client.status()

    try:
        job = daemon.submit("ann", min_nodes=2, max_nodes=2)
        [sentence] = until(lambda: status("olga").failed_starts, "the operator reads of it")
        assert sentence.startswith("Leases as ann start on 2 nodes (n[0-1]), and no agent reports")
        assert "its command failed" in sentence
        assert status("ann").failed_starts == ()
        assert status("bob").failed_starts == ()
        until(lambda: "its command failed" in daemon.job(job).reason, "the owner reads why")
        until(lambda: (daemon.metric("failed_starts") or 0) >= 2, "it is counted")
        machine.mended = True
        [lease, *_] = until(lambda: machine.of("ann"), "a lease is taken again")
        agent = Agent(daemon, lease)
        agent.hello()
        until(lambda: daemon.metric("failed_starts") == 0, "the row is over")
        [rest] = status("olga").failed_starts
        assert "2 nodes" not in rest, "no longer of the node whose agent has reported"
    finally:
        if agent is not None:
            agent.close()
        daemon.stop()
