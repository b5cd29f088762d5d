"""Leases whose agents cannot start, because the Python of the nodes cannot import MalleTrain: the
operator and the owner of the job read why, and no lease is taken for a while.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.integration.installed import Installed
from tests.integration.test_main_job import STEADY

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
WHY = "No module named 'malletrain'"


def test_an_installation_that_nodes_cannot_import_is_named_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # leases have the cluster's environment
    site = Installed(tmp_path / "site", nodes=2)
    try:
        site.start_daemon()
        [installed] = (site.root / "venv" / "lib").glob("python*/site-packages/malletrain.pth")
        lines = installed.read_text()
        installed.write_text("")
        job = site.submit(site.script("steady.py", STEADY), nodes=(1, 2))
        with site.client() as client:
            site.until(lambda: client.status().failed_starts, "the operator reads of it")
            site.until(
                lambda: "next is requested in" in " ".join(client.status().failed_starts),
                "no lease is requested for a while",
            )
            [sentence] = client.status().failed_starts
        assert "start on 2 nodes (n[1-2])" in sentence
        assert WHY in sentence
        assert WHY in site.job(job).reason
        checked = subprocess.run(
            [site.python, "-m", "malletrain", "check", "--config", str(site.config)],
            cwd=site.root,
            env={"PYTHONPATH": ":".join(lines.split())},
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 1, checked.stdout + checked.stderr
        assert WHY in " ".join(checked.stdout.split())
        installed.write_text(lines)
        site.until(lambda: site.job(job).nodes, "a mended installation is used")
        with site.client() as client:
            site.until(lambda: not client.status().failed_starts, "nothing more is said")
    finally:
        site.stop()
