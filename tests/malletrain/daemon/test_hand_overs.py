"""A job is named whose nodes have not the time to hand over their part of a snapshot in memory, to
its owner and to operators.
"""

from __future__ import annotations

import pytest

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Imagined, until
from tests.malletrain.daemon.test_other_users_agents import agent, lease_of, start  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("replicated", [False, True])
def test_whose_nodes_have_not_the_time_is_told(start, agent, replicated):  # noqa: F811
    machine = Imagined("n0")
    daemon = start(machine)
    job = daemon.submit("ann")
    [lease] = lease_of(machine, "ann")
    one = agent(daemon, lease)
    one.hello()
    assert one.work(job).hand_over_bytes == 3_500_000_000, "10 s at 350 MB/s"
    newest = {"saved": True, "path": "/x.pt", "bytes": 50_000_000_000, "seconds": 9.0, "nodes": 2}
    one.say(messages.Notice(job, 0, "snapshot", "", {**newest, "replicated": replicated}))
    one.say(messages.Heartbeat("", memory_bytes=30_000_000_000))

    def shown(user):
        with daemon.client(user) as client:
            return client.job(job).memory, client.status().late

    until(lambda: "30 GB" in shown("ann")[0], "what it takes is known")
    memory, late = shown("ann")
    assert ("hands over 25 GB, which takes 71.4 s at 350 MB/s" in memory) is not replicated
    assert ("the 10 s of drain_timeout" in memory) is not replicated
    assert late == ({} if replicated else {job: memory.partition("on one. ")[2]})
    assert shown("olga")[1] == late, "an operator"
    assert shown("bob")[1] == {}
