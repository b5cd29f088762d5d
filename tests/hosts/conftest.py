"""Hosts for each test that asks for them; skipped with the reason where there can be none."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.bed import HEAD, Bed, missing
from tests.hosts.site import HostsSite


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith("tests/hosts/"):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture
def hosts():
    """Call it for a bed, with the options of :class:`Bed`."""
    if reason := missing():
        pytest.skip(reason)
    # /tmp is every host's own.
    root = Path(tempfile.mkdtemp(prefix="mt-hosts-", dir="/var/tmp"))
    root.chmod(0o755)
    beds: list[Bed] = []

    def start(*options: Any, **more: Any) -> Bed:
        beds.append(Bed(root, *options, **more))
        return beds[0].start()

    yield start
    for bed in beds:
        bed.stop()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def boot(hosts):
    """Call it for root's site on a bed: ``boot(nodes, head_hosts, node_hosts, grace=…, named=…,
    daemon=…, slurm=…, allocation=…, jobs=…, fabric=…)``; the daemon is not started yet.
    """

    def start(
        nodes: int,
        head_hosts: str = f"{HEAD} head",
        node_hosts: str = "",
        grace: int = 6,
        named: bool = True,
        **lines: str,
    ) -> HostsSite:
        bed = hosts(nodes, head_hosts, node_hosts, grace=grace, named=named)
        return HostsSite(bed, bed.root / "shared", **lines)

    return start
