"""What operators let be leased, with a real daemon: pause, drain and exclude, and that a kill -9 of
the daemon forgets none of it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from malletrain.client import ClientError
from tests.integration.embedded import site
from tests.integration.faults import SERVICE


def command_line(made, *words):
    """What a command of the command line says."""
    argv = [sys.executable, "-m", "malletrain", *words, "--state-dir", str(made.state)]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


def do(made, op, **params):
    with made.client() as client:
        return client.call(op, params, changes=True)["sentence"]


def polled(made, times=2):
    """Wait until the main scheduler was asked again, and what follows from it was done."""
    for _ in range(times):
        with made.client() as client:
            last = client.status().last_poll
            made.until(lambda last=last: client.status().last_poll != last, "a poll")


def drained_for_a_moment(made):
    """Drain all nodes until soon. False: this machine was so slow that "soon" was over."""
    with made.client() as client:
        soon = client.status().now + 2.0
    try:
        return do(made, "drain", nodes=["*"], until=soon)
    except ClientError as error:
        if "in the past" not in str(error):
            raise
        return False


def nodes(made):
    with made.client() as client:
        return {view.node: view for view in client.nodes(explain=True)}


def test_operators_pause_drain_and_exclude(tmp_path):
    with site(tmp_path, nodes=2) as made:
        output = command_line(made, "pause", "--why", "a look at the network")
        assert output.startswith("Nothing new is leased")
        script, curve = made.script("service.py", SERVICE), {"1": 10.0, "2": 20.0}
        job = made.submit(script, nodes=(1, 2), mode="service", curve=curve, profile=False)
        polled(made)
        assert made.events("lease-requested") == []
        assert "a look at the network" in command_line(made, "status")
        assert "There is no lease to give back." in do(made, "pause", release=True)
        assert do(made, "resume") == "The pause is over."
        made.until(lambda: len(made.job(job).nodes) == 2, "it has both nodes")

        # One node is given back and stays so over a kill -9; the job goes on.
        drained = do(made, "drain", nodes=["n2"])
        assert drained.startswith("n2: Drained by")
        assert drained.endswith("1 lease is given back once its job has moved off.")
        made.until(lambda: made.job(job).nodes == ("n1",), "it moved off")
        made.until(lambda: nodes(made)["n2"].lease == "", "its lease has ended")
        made.kill_daemon()
        made.start_daemon()
        made.until(lambda: made.job(job).nodes == ("n1",), "the job is adopted")
        polled(made)
        assert nodes(made)["n2"].lease == ""
        assert any(rule == "operator" and not good for rule, good, _ in nodes(made)["n2"].rules)
        assert made.job(job).nodes == ("n1",)
        assert "May be leased again: n2." in do(made, "resume", nodes=["n2"])
        made.until(lambda: len(made.job(job).nodes) == 2, "it has both nodes again")

        # All of them, for a moment; then everything goes on by itself.
        made.until(lambda: drained_for_a_moment(made), "they are drained")
        made.until(lambda: made.events("node-resumed")[1:], "the time is up")
        made.until(lambda: len(made.job(job).nodes) == 2, "it came back")

        # Excluded: what is held stays, nothing new is taken; the red button gives all back.
        do(made, "exclude", nodes=["n1"])
        assert "2 leases are given back" in do(made, "pause", release=True)
        made.until(lambda: made.job(job).state == "suspended", "it waits")
        do(made, "resume")
        made.until(lambda: made.job(job).nodes == ("n2",), "it has the node that is left")
        made.until(lambda: nodes(made)["n1"].lease == "", "its old lease has ended")
        polled(made)
        assert nodes(made)["n1"].lease == ""
        for wrong in ({"nodes": []}, {"nodes": ["nowhere"]}, {"nodes": ["n1"], "until": 1.0}):
            with pytest.raises(ClientError):
                do(made, "drain", **wrong)
        with pytest.raises(ClientError, match="pause was not there"):
            do(made, "resume")
        with made.client() as client:
            client.cancel([job])
        made.until_state(job, "cancelled")
