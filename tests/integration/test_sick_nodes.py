"""Nodes that fail the site's health check, with real agents: their jobs move off in order, nobody
is to blame, and they are left alone for a while.
"""

from __future__ import annotations

import signal

import pytest

from tests.integration.embedded import site
from tests.integration.test_main_job import STEADY

CHECK = """#!/bin/sh
# A node is sick as long as there is a file of its name.
if [ -e "{root}/$MALLETRAIN_NODE" ]; then echo "no scratch on $MALLETRAIN_NODE"; exit 1; fi
"""
FAILS_ON_A_SICK_NODE = STEADY.replace(
    "    malletrain.report(8)",
    """    if os.path.exists(os.path.join("{root}", os.environ["MALLETRAIN_NODE"])):
        raise SystemExit("this GPU is broken")
    malletrain.report(8)""",
)


@pytest.fixture
def make(tmp_path):
    """Nodes whose health is looked after every ``interval``."""
    sick = tmp_path / "sick"
    sick.mkdir()
    check = tmp_path / "check"
    check.write_text(CHECK.format(root=sick))
    check.chmod(0o755)

    def made(interval, sick_for="1 h", nodes=3):
        section = (
            f'\n[nodes]\nhealth_check = ["{check}"]\nhealth_interval = "{interval}"\n'
            f'health_timeout = "60 s"\nsick_for = "{sick_for}"\n'
        )
        return site(tmp_path / "site", nodes=nodes, config=section)

    made.sick = sick
    return made


def states(embedded):
    with embedded.client() as client:
        return {view.node: view.state for view in client.nodes()}


@pytest.mark.thorough
def test_a_node_that_is_sick_from_the_beginning_gets_no_job(make):
    (make.sick / "n1").touch()
    with make("1 h") as embedded:
        job = embedded.submit(embedded.script("steady.py", STEADY), nodes=(1, 3))
        embedded.until(lambda: embedded.events("node-sick"), "the check is heard of")
        embedded.until(lambda: len(embedded.job(job).nodes) == 2, "the job has the other nodes")
        embedded.until(lambda: states(embedded).get("n1") == "sick", "its lease has ended")
        assert "n1" not in embedded.job(job).nodes
        (event,) = embedded.events("node-sick")
        assert event.sentence == "The health check check failed with code 1: no scratch on n1"
        rounds = embedded.events("round-formed", job)
        assert all("n1" not in e.data.get("members", ()) for e in rounds)
        # A daemon that is started again knows it still.
        embedded.kill_daemon(signal.SIGKILL)
        embedded.start_daemon()
        embedded.until(lambda: embedded.events("job-adopted", job), "the job is adopted")
        embedded.until(lambda: states(embedded).get("n1") == "sick", "n1 is left alone")
        assert len(embedded.events("node-sick")) == 1
        (embedded.work / "stop").touch()
        assert embedded.until_state(job, "completed", "failed").tries == 0


def test_a_node_that_falls_sick_gives_its_job_away_in_order_and_comes_back(make):
    with make("1 s", sick_for="2 s", nodes=2) as embedded:
        job = embedded.submit(embedded.script("steady.py", STEADY), nodes=(1, 2))
        embedded.until(lambda: len(embedded.job(job).nodes) == 2, "the job runs on 2 nodes")
        embedded.until_samples(job, 100)
        victim = embedded.job(job).nodes[-1]
        (make.sick / victim).touch()
        embedded.until(lambda: embedded.events("node-sick"), "the check is heard of")
        embedded.until(lambda: victim not in embedded.job(job).nodes, "the job has moved off")
        (make.sick / victim).unlink()
        assert not embedded.events("node-vanished")
        embedded.until(lambda: victim in embedded.job(job).nodes, "the node is of use again")
        (embedded.work / "stop").touch()
        done = embedded.until_state(job, "completed", "failed")
        assert (done.state, done.tries) == ("completed", 0)


@pytest.mark.thorough
def test_workers_that_fail_on_a_sick_node_cost_the_job_no_try(make):
    with make("1 h") as embedded:
        script = embedded.script("breaks.py", FAILS_ON_A_SICK_NODE.format(root=make.sick))
        job = embedded.submit(script, nodes=(1, 3))
        embedded.until(lambda: len(embedded.job(job).nodes) == 3, "the job runs on 3 nodes")
        embedded.until_samples(job, 100)
        victim = embedded.job(job).nodes[-1]
        (make.sick / victim).touch()
        embedded.until(lambda: embedded.events("node-sick"), "the check is heard of")
        embedded.until(
            lambda: len(embedded.job(job).nodes) == 2, "the job goes on without the node"
        )
        before = embedded.job(job).samples
        embedded.until_samples(job, before + 100)
        assert not embedded.events("workers-failed", job)
        (embedded.work / "stop").touch()
        done = embedded.until_state(job, "completed", "failed")
        assert (done.state, done.tries) == ("completed", 0)
