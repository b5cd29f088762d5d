"""A real Slurm for each test that asks for one; skipped with the reason where there can be none,
failed in CI.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.slurm import accounting
from tests.slurm import cluster as slurm_cluster
from tests.slurm.cluster import SlurmCluster


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith("tests/slurm/"):
            item.add_marker(pytest.mark.slurm)


def skip_for(reason: str) -> None:
    """Skip the test for this reason, if there is one; in CI fail it."""
    if reason and os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def root():
    """A short, public directory: sockets lie in it, and jobs of other users."""
    path = Path(tempfile.mkdtemp(prefix="mt-slurm-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def cluster(root):
    """Call it to start a Slurm; it is stopped afterwards and must have left nothing."""
    skip_for(slurm_cluster.missing())
    started: list[SlurmCluster] = []

    def start(
        nodes: int = 4, kind: type[SlurmCluster] = SlurmCluster, **options: object
    ) -> SlurmCluster:
        started.append(kind(root / f"c{len(started)}", nodes, **options))
        return started[-1].start()

    yield start
    leftovers = [line for one in started for line in one.stop()]
    assert not leftovers, f"Processes of jobs were left over: {leftovers}"
    assert not [path for path in root.glob("c*") if path.exists()]


@pytest.fixture
def accounted(cluster):
    """Call it to start a Slurm with accounting."""
    skip_for(accounting.missing())
    return partial(cluster, kind=accounting.AccountedCluster)
