"""Jobs that ask for a class of nodes or a kind of slots, in a running daemon."""

from __future__ import annotations

import pytest

from malletrain.client import ClientError
from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until
from tests.malletrain.daemon.test_trainers import TwoClasses

GAPS = """
[gaps]
classes = ["a100", "xeon"]
"""


@pytest.fixture
def daemon(tmp_path):
    daemon = RunningDaemon(tmp_path, TwoClasses("g1", "g2", "x1"), allocation=GAPS)
    yield daemon
    daemon.stop()


def test_leases_are_taken_of_the_kind_that_the_job_asks_for(daemon):
    job = daemon.submit("ann", max_nodes=3, node_class="a100")
    until(lambda: len(daemon.machine.of("ann")) == 2, "ann has both nodes of the kind")
    leases = daemon.machine.of("ann")
    assert {daemon.machine.requests[lease].node for lease in leases} == {"g1", "g2"}
    daemon.submit("bob", max_nodes=3, min_nodes=2, node_class="xeon", name="wide")
    with daemon.client("ann") as client:
        assert client.job(job).spec["node_class"] == "a100"
    with daemon.client("bob") as client:
        [wide] = [job for job in client.jobs() if job.name == "wide"]
    assert wide.reason.startswith("needs 2 nodes at least, none is held")
    assert "of kind xeon" in wide.reason


def test_a_kind_that_the_site_does_not_have_is_refused(daemon, tmp_path):
    with pytest.raises(ClientError) as refused:
        daemon.submit("ann", node_class="h100")
    assert str(refused.value) == "There is no kind 'h100' here; the site has a100, xeon."


def test_a_site_with_one_kind_of_nodes_says_so(tmp_path):
    daemon = RunningDaemon(tmp_path, Imagined("n1"))
    try:
        with pytest.raises(ClientError) as refused:
            daemon.submit("ann", node_class="gpu")
        assert str(refused.value) == (
            "The job asks for kind 'gpu', and this site distinguishes no kinds of nodes; leave "
            "--kind out."
        )
    finally:
        daemon.stop()
