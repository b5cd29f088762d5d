"""What slots cost in a running daemon, also before its first poll."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

SLOTS = """
[[scheduler.slurm.slots]]
name = "gpu"
gpus = 1
memory = "1 GiB"
"""


class Slots(Imagined):
    """A scheduler with one slot, a quarter of its host. It answers while ``answers`` is set."""

    def __init__(self) -> None:
        super().__init__("n1")
        self.answers = threading.Event()
        self.answers.set()

    def poll(self):
        assert self.answers.wait(PATIENCE_S)
        result = super().poll()
        gaps = tuple(dataclasses.replace(gap, node_class="gpu") for gap in result.gaps)
        return dataclasses.replace(result, gaps=gaps, kind_parts={"gpu": 0.25})


def price_held(daemon, job):
    """The price at which the job is charged for its node; None if it has none."""
    record = daemon.components.state.controller.goals.records.get(job)
    holds = [] if record is None else list(record.account.holds.values())
    return holds[0].price if holds else None


def test_a_daemon_that_starts_charges_as_before_without_a_poll(tmp_path):
    machine = Slots()
    daemon = RunningDaemon(tmp_path, machine, allocation=SLOTS)
    agents = []
    try:
        job = daemon.submit("ann", max_nodes=1, budget_nh=600 / 3600)
        [lease] = until(lambda: machine.of("ann"), "the slot is leased")
        agents.append(Agent(daemon, lease))
        agents[-1].hello(node_class="gpu")
        agents[-1].work(job)
        until(lambda: price_held(daemon, job) == 0.25, "the job is charged for a quarter")
        agents[-1].close()
        daemon.stop()
        machine.answers.clear()
        daemon = RunningDaemon(tmp_path, machine, allocation=SLOTS)
        agents.append(Agent(daemon, lease))
        agents[-1].hello(node_class="gpu", assignment=messages.Assignment(job, "running", 1))
        until(lambda: price_held(daemon, job) is not None, "the job is adopted")
        assert daemon.components.leases.last_poll is None
        assert price_held(daemon, job) == 0.25
        assert not daemon.components.state.controller.state.unpriced
    finally:
        machine.answers.set()
        for agent in agents:
            agent.close()
        daemon.stop()


def test_a_kind_that_no_host_has_does_not_stay_without_a_price(tmp_path):
    """With a kind at price 0, a job of any class would be admitted with any budget."""
    absent = SLOTS.replace('"gpu"', '"absent"')
    daemon = RunningDaemon(tmp_path, Slots(), allocation=SLOTS + absent)
    try:
        controller = daemon.components.state.controller
        until(lambda: controller.state.prices.get("gpu") == 0.25, "the poll tells the price")
        assert controller.state.prices["absent"] == 1.0
        assert not controller.state.unpriced
        assert controller.goals.least_budget_s(1) > 0.0
    finally:
        daemon.stop()


def test_no_price_is_known_before_the_first_poll_of_a_site(tmp_path):
    machine = Slots()
    machine.answers.clear()
    daemon = RunningDaemon(tmp_path, machine, allocation=SLOTS)
    try:
        controller = daemon.components.state.controller
        until(lambda: controller.state.unpriced == {"gpu"}, "the price is unknown")
        machine.answers.set()
        until(lambda: not controller.state.unpriced, "the poll tells the price")
        assert controller.state.prices == {"gpu": 0.25}
    finally:
        machine.answers.set()
        daemon.stop()
