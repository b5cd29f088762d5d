"""How many nodes the daemon says are held and idle, between two polls."""

from __future__ import annotations

import dataclasses
import time

from scavenger.interface import Gap
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until


class Stale(Imagined):
    """Its gaps are always those that there were before anything was leased."""

    def poll(self):
        gaps = tuple(Gap(node, time.time()) for node in self.nodes)
        return dataclasses.replace(super().poll(), gaps=gaps)


def test_a_node_that_was_leased_since_the_last_poll_is_not_idle_as_well(tmp_path):
    daemon = RunningDaemon(tmp_path, Stale("n1", "n2", "n3"))
    try:
        with daemon.client("olga") as olga:
            until(lambda: olga.status().nodes_idle == 3, "the nodes are seen")
            daemon.submit("ann", max_nodes=2)
            leases = until(lambda: len(of := daemon.machine.of("ann")) == 2 and of, "two leases")
            assert olga.status().nodes_idle == 1
            agent = Agent(daemon, leases[0])
            agent.hello()
            until(lambda: olga.status().nodes_leased == 1, "its agent is there")
            assert olga.status().nodes_idle == 1
            agent.close()
    finally:
        daemon.stop()
