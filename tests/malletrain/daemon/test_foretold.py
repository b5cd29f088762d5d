"""What is foretold on its way through the daemon: to the first node of the job that it is about."""

from __future__ import annotations

from types import SimpleNamespace

from malletrain.core.commands import LossExpected
from malletrain.daemon.engine.transactions import CommandRunner
from malletrain.protocol import messages, wire


class Agents:
    def __init__(self):
        self.messages = []

    def tell(self, node, message):
        self.messages.append((node, message))


def test_the_node_of_rank_0_hears_how_soon_a_loss_is_expected():
    agents = Agents()
    runs = {
        "j1": SimpleNamespace(rounds=SimpleNamespace(members=("n3", "n1"))),
        "j2": SimpleNamespace(rounds=SimpleNamespace(members=())),
    }
    runner = CommandRunner(SimpleNamespace(runs=runs, agents=agents), None)
    for job in runs:
        runner.carry_out(LossExpected(job, 450.0), 0.0)
    assert agents.messages == [("n3", messages.ExpectLoss("j1", 450.0))]


def test_that_no_loss_is_expected_can_be_said():
    message = messages.ExpectLoss("j1", float("inf"))
    assert wire.decode(wire.encode(message)) == message
