"""Farms, and commands on their nodes, of several users on a real Slurm: whose processes run, and
what another user may do.
"""

from __future__ import annotations

import json

import pytest

from tests.integration import farms
from tests.slurm import guests
from tests.slurm.site import slurm_site
from tests.slurm.test_owners import User

pytestmark = pytest.mark.thorough


def test_tasks_and_commands_run_as_their_user(cluster, root):
    if reason := guests.missing():
        pytest.skip(reason)
    names = guests.users(2)
    with guests.view() as inside:
        slurm = cluster(2, inside=inside, grace=4)
        keys = root / "users"
        keys.touch(0o644)
        daemon = f'users = "{keys}"\nannounce = "{root}/site/daemon.json"'
        submit_as = 'submit_as = ["runuser", "-u", "{owner}", "--"]'
        with slurm_site(root / "site", slurm, lines=submit_as, daemon=daemon) as site:
            ann, bob = (User(name, site, inside, root) for name in names)
            keys.write_text(ann.malletrain("key").stdout + bob.malletrain("key").stdout)
            site.until(lambda: bob.malletrain("status").returncode == 0, "the list is read")

            command = "until test -e go; do sleep 0.1; done; id -un > {output}"
            words = ("--array", "0-3", "--output", "out-{index}", "--", "sh", "-c", command)
            done = ann.malletrain("map", "--name", "mine", "--json", *words)
            assert done.returncode == 0, done.stderr
            job = json.loads(done.stdout)["id"]
            site.until(lambda: farms.tasks(site, job).counts["running"], "a task runs")

            says = ann.malletrain("exec", job, "--", "id", "-un")
            assert says.stdout == f"{ann.name}\n", says.stderr
            for refused in (
                bob.malletrain("exec", job, "--", "id", "-un"),
                bob.malletrain("tasks", job),
                bob.malletrain("retry", job, "--failed"),
                bob.malletrain("logs", job, "--task", "0"),
            ):
                assert refused.returncode != 0
                assert f"belongs to {ann.name}" in refused.stderr
            assert "id -un" not in bob.malletrain("show", job).stdout, "the command is hers"

            (ann.home / "go").touch()
            site.until_state(job, "completed", "failed")
            assert site.job(job).state == "completed"
            for index in range(4):
                result = ann.home / f"out-{index}"
                assert result.read_text() == f"{ann.name}\n"
                assert result.stat().st_uid == ann.uid
