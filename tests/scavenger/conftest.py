"""A cluster per test, and a check that no test leaves a process behind."""

import pytest

from scavenger.embedded import processes
from scavenger.embedded.cluster_process import ClusterProcess, start_cluster
from tests.waiting import NEVER_S, until


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
        options.setdefault("lifetime_s", NEVER_S)
        options.setdefault("grace_s", 1.0)
        options.setdefault("sweep_s", 0.3)
        started.append(start_cluster(directory, nodes, **options))
        return started[-1]

    yield start
    for one in started:
        if one.alive():
            one.stop()
    # The kernel needs a moment after a cluster was killed outright.
    until(lambda: not processes_of(directory), "all processes of the leases to be gone")
