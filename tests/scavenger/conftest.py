"""A cluster per test, and a check that no test leaves a process behind."""

import time

import pytest

from scavenger.embedded import processes
from scavenger.embedded.cluster_process import ClusterProcess, start_cluster


def wait_for(condition, what, timeout_s=15.0):
    """Poll until ``condition()`` is true and return its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def processes_of(directory):
    """Live processes of any lease of the cluster in ``directory``."""
    return processes.with_environment([f"MALLETRAIN_CLUSTER={directory}"])


@pytest.fixture
def cluster(tmp_path):
    """Call it to start a cluster (options of start_cluster); it is stopped afterwards and must have
    left nothing.
    """
    directory = tmp_path / "cluster"
    started: list[ClusterProcess] = []

    def start(nodes=2, **options):
        options.setdefault("lifetime_s", 60.0)
        options.setdefault("grace_s", 1.0)
        options.setdefault("sweep_s", 0.3)
        started.append(start_cluster(directory, nodes, **options))
        return started[-1]

    yield start
    for one in started:
        if one.alive():
            one.stop()
    # The kernel needs a moment after a cluster was killed outright.
    wait_for(lambda: not processes_of(directory), "all processes of the leases to be gone")
