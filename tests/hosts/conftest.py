"""Hosts for each test that asks for them; skipped with the reason where there can be none."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.hosts.bed import HEAD, Bed, missing
from tests.hosts.site import HostsSite


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture
def boot():
    """Call it for a bed and a site on it: ``boot(nodes, head_hosts, node_hosts, daemon=…,
    allocation=…, jobs=…, fabric=…)``; the daemon is not started yet.
    """
    if reason := missing():
        pytest.skip(reason)
    # /tmp is every host's own.
    root = Path(tempfile.mkdtemp(prefix="mt-hosts-", dir="/var/tmp"))
    root.chmod(0o755)
    beds: list[Bed] = []

    def start(
        nodes: int, head_hosts: str = f"{HEAD} head", node_hosts: str = "", **lines: str
    ) -> HostsSite:
        beds.append(Bed(root, nodes, head_hosts, node_hosts))
        return HostsSite(beds[0].start(), root / "shared", **lines)

    yield start
    for bed in beds:
        bed.stop()
    shutil.rmtree(root, ignore_errors=True)
