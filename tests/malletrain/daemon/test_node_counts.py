"""How many nodes the daemon says are held and idle, between two polls."""

from __future__ import annotations

import dataclasses
import time

from malletrain.client import operations
from malletrain.protocol import farm, messages
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


def test_nodes_that_train_and_nodes_of_farms_are_counted_apart(tmp_path):
    daemon = RunningDaemon(tmp_path, Imagined("n1", "n2", "n3", "n4"))
    agents = []
    try:
        with daemon.client("ann") as ann, daemon.client("olga") as olga:
            daemon.submit("bob", min_nodes=2, max_nodes=2)
            task = farm.FarmSpec(("run", "{x}"), ("x",), 1, "logs/{index}.log", cpus=1)
            farming = daemon.submit("ann", farm=task, mode="farm", goal="throughput", max_nodes=1)
            ann.do(operations.add_tasks(farming, 0, [["v"]]))
            leases = until(
                lambda: len(daemon.machine.of("bob")) == 2 and daemon.machine.of("ann"),
                "three leases",
            )
            for lease in (*daemon.machine.of("bob"), *leases):
                agents.append(Agent(daemon, lease))
                agents[-1].hello()
            for agent in agents:
                agent.hear(messages.Assign)

            def counts():
                status = olga.status()
                return status.nodes_leased, status.nodes_training, status.nodes_farming

            until(lambda: counts() == (3, 2, 1), "all are counted")
            ann.do(operations.cancel([farming]))
            agents[-1].hear(messages.Release)
            agents[-1].say(messages.Released(farming))
            until(lambda: counts() == (3, 2, 0), "the farm's node is still leased, without a job")
    finally:
        for agent in agents:
            agent.close()
        daemon.stop()
