"""A node that holds up the others of its job, with real agents and workers: named, swapped out, and
remembered by a daemon that is started again.
"""

from __future__ import annotations

import signal

import pytest

from tests.integration.embedded import site
from tests.integration.test_sick_nodes import states

WAITS = """
import os, time, malletrain
slow = os.path.exists(os.path.join("slow", os.environ["MALLETRAIN_NODE"]))
while not os.path.exists("stop"):
    time.sleep(0.02)
    malletrain.report(8, busy_s=0.02 if slow else 0.0002)
"""
"""Every rank takes as long for a step as the slow one, which alone works all the time. What each
says of it does not depend on the machine.
"""


@pytest.mark.thorough
def test_a_slow_node_is_named_swapped_out_and_remembered(tmp_path):
    section = '\n[nodes]\nslow_nodes = "swap"\nslow_after = "0.6 s"\n'
    with site(tmp_path / "site", nodes=3, config=section) as embedded:
        (embedded.work / "slow").mkdir()
        (embedded.work / "slow" / "n2").touch()
        job = embedded.submit(embedded.script("waits.py", WAITS), nodes=(1, 3))
        embedded.until(lambda: embedded.events("node-slow"), "the slow node is found")
        embedded.until(
            lambda: set(embedded.job(job).nodes) == {"n1", "n3"}, "the job goes on without it"
        )
        embedded.until(lambda: states(embedded).get("n2") == "slow", "its lease has ended")
        (event,) = embedded.events("node-slow")
        assert (event.node, event.job) == ("n2", job)
        assert event.sentence.startswith("n2 takes ")
        assert event.data["slowdown"] > 2
        reclaimed = embedded.events("node-reclaimed")[-1]
        assert reclaimed.sentence.startswith("n2 takes ")
        assert reclaimed.sentence.endswith(" The job is faster without it.")
        embedded.kill_daemon(signal.SIGKILL)
        embedded.start_daemon()
        embedded.until(lambda: embedded.events("job-adopted", job), "the job is adopted")
        embedded.until(lambda: states(embedded).get("n2") == "slow", "n2 is left alone still")
        with embedded.client() as client:
            (view,) = (view for view in client.nodes() if view.node == "n2")
        assert view.rules[-1][:2] == ("pace", False)
        assert view.rules[-1][2].startswith(f"{event.sentence} It is left alone for another ")
        (embedded.work / "stop").touch()
        done = embedded.until_state(job, "completed", "failed")
        assert (done.state, done.tries) == ("completed", 0)
