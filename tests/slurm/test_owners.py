"""One daemon for several users of a real Slurm: whose processes run where, and what one may do with
the jobs of another.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys

import psutil
import pytest

from tests.integration.test_main_job import STEADY
from tests.slurm import guests
from tests.slurm.site import slurm_site
from tests.waiting import until


class User:
    """Somebody on a login node of the site."""

    def __init__(self, name, site, inside, root):
        self.name, self.site, self.inside = name, site, inside
        self.home = root / name
        self.home.mkdir(mode=0o700)
        entry = pwd.getpwnam(name)
        self.uid = entry.pw_uid
        os.chown(self.home, entry.pw_uid, entry.pw_gid)
        self.become = [
            "env",
            f"--chdir={self.home}",
            "setpriv",
            f"--reuid={self.uid}",
            f"--regid={entry.pw_gid}",
            "--clear-groups",
        ]
        (self.home / "steady.py").write_text(STEADY)

    def malletrain(self, *args, munge=""):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "COLUMNS": "200",
            "MALLETRAIN_MUNGE_SOCKET": munge,
            "MALLETRAIN_DAEMON": str(self.site.root / "daemon.json"),
        }
        argv = [*self.inside, *self.become, sys.executable, "-m", "malletrain", *args]
        return subprocess.run(argv, env=environment, capture_output=True, text=True)

    def submit(self, name, nodes, **more):
        done = self.malletrain(
            "submit",
            "--name",
            name,
            "--nodes",
            nodes,
            "--env",
            "MALLETRAIN_PRELOAD=0",
            "--json",
            "steady.py",
            **more,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["id"]


@pytest.mark.thorough
def test_the_jobs_of_two_users_share_the_idle_nodes_each_as_its_owner(cluster, root):
    if reason := guests.missing():
        pytest.skip(reason)
    ann, bob = guests.users(2)
    with guests.view() as inside:
        slurm = cluster(6, inside=inside, grace=4)
        munge = str(slurm.root / "run" / "munge.socket")
        listed = root / "users"
        listed.touch(0o644)
        daemon = (
            f'users = "{listed}"\nmunge = true\nmunge_socket = "{munge}"\nannounce = '
            f'"{root}/site/daemon.json"'
        )
        with slurm_site(
            root / "site",
            slurm,
            lines='submit_as = ["runuser", "-u", "{owner}", "--"]',
            daemon=daemon,
        ) as site:
            ann, bob = User(ann, site, inside, root), User(bob, site, inside, root)

            # Ann is not known until the operator lists her key; Bob is vouched for by MUNGE.
            refused = ann.malletrain("status")
            assert refused.returncode == 1
            line = ann.malletrain("key").stdout
            assert (
                "does not know your key. MUNGE could not tell it who you are: munge refused"
                in refused.stderr
            )
            assert line.strip() in refused.stderr
            listed.write_text(line)
            site.until(lambda: ann.malletrain("status").returncode == 0, "the list is read again")

            # Ann's job has the machine; Bob's gets a share of it, on leases of his own.
            job = ann.submit("one", "1:6")
            site.until(lambda: len(site.job(job).nodes) == 6, "Ann's job has all nodes")
            other = bob.submit("one", "1:6", munge=munge)
            site.until(lambda: site.job(other).nodes, "Bob's job has nodes")
            site.until_samples(other, 10)
            assert site.job(job).tries == site.job(other).tries == 0

            def owned():
                """Slurm is asked last: nodes may just come and go."""
                used = dict.fromkeys(site.job(job).nodes, ann.name)
                used.update(dict.fromkeys(site.job(other).nodes, bob.name))
                running = slurm.run("squeue", "-h", "-t", "R", "-o", "%N|%u").splitlines()
                owners = dict(line.split("|") for line in running)
                there = set(used.values()) == {ann.name, bob.name}
                return there and used == {node: owners.get(node) for node in used}

            site.until(owned, "the nodes of each are leased as their user")

            def workers():
                """User → what it runs and with what environment, of the workers there are now."""
                by_user = {}
                for p in slurm.jobs_processes():
                    with contextlib.suppress(psutil.Error):
                        if "steady.py" in " ".join(_line(p)):
                            by_user[p.uids().real] = (_line(p), p.environ())
                return by_user if set(by_user) == {ann.uid, bob.uid} else None

            of_users = until(workers, "both train, and nobody else")
            for user in (ann, bob):
                command, environment = of_users[user.uid]
                assert str(user.home / "steady.py") in command
                assert "MALLETRAIN_LEASE_KEY" not in environment

            # Each has "one" as the name of a job; of another's job there is little to see and
            # nothing to do.
            assert ann.name in ann.malletrain("show", "one").stdout
            assert bob.name in bob.malletrain("show", "one", munge=munge).stdout
            for command in ("cancel", "logs"):
                refused = ann.malletrain(command, other)
                assert refused.returncode == 1
                assert f"belongs to {bob.name}; only its owner or an operator can" in refused.stderr
            assert "MALLETRAIN_PRELOAD" in ann.malletrain("show", job, "--json").stdout
            assert "MALLETRAIN_PRELOAD" not in ann.malletrain("show", other, "--json").stdout

            # A restart of the daemon: leases of both are adopted, Bob is vouched for anew.
            site.kill_daemon(9)
            site.start_daemon()
            for each in (job, other):
                site.until(lambda each=each: site.events("job-adopted", each), "the job is adopted")
            assert bob.malletrain("cancel", "one", munge=munge).returncode == 0
            assert site.until_state(other, "cancelled")
            assert not site.job(job).state.startswith("c")
            assert ann.malletrain("cancel", "one").returncode == 0
            site.until_state(job, "cancelled")
            site.until(lambda: not slurm.leases(), "every lease is given back")


def _line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
