"""A job that has begun keeps the largest scale that its processes are sized for."""

from __future__ import annotations

import pytest

from malletrain.client.errors import ClientError
from tests.malletrain.daemon.forged import Imagined
from tests.malletrain.daemon.test_other_users_agents import agent, lease_of, start  # noqa: F401


def limit(daemon, job, low, high):
    with daemon.client("ann") as client:
        limits = {"job": job, "min_nodes": low, "max_nodes": high}
        return client.call("scale", limits, changes=True)["sentence"]


def test_more_than_a_job_has_begun_with_is_refused_in_words(start, agent):  # noqa: F811
    machine = Imagined("n0")
    daemon = start(machine)
    job = daemon.submit("ann", max_nodes=2)
    assert "may use 1:3 nodes, not 1:2." in limit(daemon, job, 1, 3)  # it has not begun
    assert "may use 1:3 nodes, as before." in limit(daemon, job, 1, 3)
    [lease] = lease_of(machine, "ann")
    one = agent(daemon, lease)
    one.hello()
    assert one.work(job).spec.largest == 3
    with pytest.raises(ClientError, match=r"has started with at most 3 nodes.*--nodes 1:4"):
        limit(daemon, job, 1, 4)
    limit(daemon, job, 1, 1)
    with pytest.raises(ClientError, match="has started with at most 3 nodes"):
        limit(daemon, job, 1, 4)
    limit(daemon, job, 1, 3)


def test_a_service_has_nothing_that_is_sized(start, agent):  # noqa: F811
    machine = Imagined("n0")
    daemon = start(machine)
    job = daemon.submit("ann", mode="service", curve={str(k): float(k) for k in range(1, 5)})
    [lease] = lease_of(machine, "ann")
    one = agent(daemon, lease)
    one.hello()
    one.work(job)
    limit(daemon, job, 1, 4)
