"""An agent's messages about its node's health over a link that comes and goes. The check is a real
process.
"""

from __future__ import annotations

import time

from malletrain.agent.config import AgentConfig
from malletrain.agent.health import NodeFitness
from malletrain.agent.process import reap_orphans
from malletrain.protocol.messages import Assignment, Doubt, Phase
from malletrain.protocol.phases import AssignmentPhase
from malletrain.protocol.site_rules import HealthPlan
from tests.waiting import until

FAILED = Phase(Assignment("j1", AssignmentPhase.FAILED))


class LinkedNode:
    """A node whose workers have failed, with the daemon near or away."""

    def __init__(self, directory, check):
        self.near = True
        self.messages, self.heard = [], []
        plan = HealthPlan(("sh", "-c", check), gpus=False)
        config = AgentConfig("tcp://head:1", "l1", "n1", "n1", None, "", "", health=plan)
        self.fitness = NodeFitness(config, directory, self.send)
        self.fitness.send(FAILED)

    def send(self, message):
        self.messages.append(message)
        if self.near:
            self.heard.append(message)
        return self.near

    def look(self):
        """Step until the check has ended and a message was sent."""
        before = len(self.messages)

        def has_message():
            self.fitness.step(time.monotonic())
            reap_orphans()
            return len(self.messages) > before

        until(has_message, "the look is over")

    def come_back(self):
        self.near = True
        self.fitness.reconnected()


def test_a_doubt_that_ends_while_the_daemon_is_away_ends_there_too(tmp_path):
    node = LinkedNode(tmp_path, "true")
    assert node.heard == [Doubt("j1"), FAILED]
    node.near = False
    node.look()
    node.come_back()
    assert node.heard[-1] == Doubt("j1", over=True)


def test_a_doubt_goes_on_for_a_daemon_that_was_away_when_it_began(tmp_path):
    node = LinkedNode(tmp_path, "true")
    node.heard.clear()  # lost with the connection
    node.come_back()
    assert node.heard == [Doubt("j1")]
    node.look()
    assert node.heard[-1] == Doubt("j1", over=True)


def test_a_node_that_is_sick_stays_in_doubt(tmp_path):
    node = LinkedNode(tmp_path, "echo no scratch; false")
    node.near = False
    node.look()
    node.come_back()
    assert node.fitness.sick.endswith("no scratch"), "Hello has said it"
    assert Doubt("j1", over=True) not in node.messages
