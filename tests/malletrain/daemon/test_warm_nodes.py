"""What the processes of a job report of its data cache reaches the plans."""

from __future__ import annotations

import pytest

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Imagined, until
from tests.malletrain.daemon.test_other_users_agents import agent, lease_of, start  # noqa: F401
from tests.malletrain.daemon.test_worker_counts import facts

pytestmark = pytest.mark.slow


def test_plans_know_how_long_reading_again_would_take(start, agent):  # noqa: F811
    machine = Imagined("n0")
    daemon = start(machine)
    job = daemon.submit("ann")
    [lease] = lease_of(machine, "ann")
    one = agent(daemon, lease)
    one.hello()
    one.work(job)
    controller = daemon.components.state.controller

    def report(**changes):
        data = facts(node=one.node, source_reads=100, present=100, **changes)
        one.say(messages.Notice(job, 0, "data", "", data))

    def reread():
        return controller.nodes[one.node].info.reread_s

    report(source_us=40_000_000)
    until(lambda: reread() == pytest.approx(40.0), "the plans know of it")
    report(source_us=42_000_000)  # too little to tell
    report(source_us=20_000_000)
    until(lambda: reread() == pytest.approx(20.0), "the plans know of less")
