"""What ``malletrain usage`` adds up, against the accounting of the Slurm that the leases ran on;
whose share it was, by Slurm's own associations.
"""

from __future__ import annotations

import csv
import getpass
import io
import json
import math

import pytest

from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.slurm.associations import read_associations
from tests.integration.test_main_job import STEADY
from tests.slurm.site import slurm_site

PREPARE = (
    "add account physics parent=root fairshare=30",
    "add account optics parent=physics fairshare=2",
    "add account arts parent=root fairshare=10",
)
SHARES = '\n[shares]\nby = "account"\nweights_from = "slurm"\nweights = ["arts 2"]\n'


@pytest.fixture
def slurm(accounted):
    return accounted(4, prepare=PREPARE, grace=3600)


def recounted(slurm):
    """(node-seconds of all leases by Slurm's own account, the standard deviation of its whole
    seconds); None while one has not ended there.

    An elapsed time is the difference of two times without their fractions: triangular within a
    second of the true one, with variance 1/6.
    """
    words = ("-nPX", "--starttime=now-1hour", "--format=JobName,State,NNodes,ElapsedRaw")
    rows = [line.split("|") for line in slurm.run("sacct", "-a", *words).splitlines()]
    leases = [row for row in rows if row[0].startswith("malletrain-")]
    if any(state in ("RUNNING", "PENDING", "REQUEUED") for _, state, _, _ in leases):
        return None
    total = sum(int(nodes) * int(seconds) for _, _, nodes, seconds in leases)
    return total, math.sqrt(sum(int(nodes) ** 2 for _, _, nodes, _ in leases) / 6)


@pytest.mark.thorough
def test_usage_is_what_slurm_accounts_for(slurm, root):
    who = ("modify", "user", getpass.getuser())
    slurm.run("sacctmgr", "-i", *who, "set", "defaultaccount=all")
    associations = read_associations(Commands(CommandPolicy(), slurm.environment))
    assert associations.accounts[getpass.getuser()] == "all"
    assert associations.account_shares["optics"] == pytest.approx(
        associations.account_shares["physics"]
    )
    assert associations.account_shares["physics"] == pytest.approx(
        3 * associations.account_shares["arts"]
    )
    with slurm_site(root / "site", slurm, allocation=SHARES) as site:
        script = site.script("steady.py", STEADY)
        job = site.submit(script, nodes=(1, 4))
        site.until(lambda: len(site.job(job).nodes) == 4, "the job has all nodes")
        for _ in range(3):
            site.until_samples(job, site.job(job).samples + 6000)
            main = slurm.submit("sleep 1", "--nodes=2", "--exclusive", "--time=1")
            slurm.until(
                lambda main=main: slurm.jobs()[main][0] == "COMPLETED", "the main job is done"
            )
            site.until(lambda: len(site.job(job).nodes) == 4, "the job has all nodes again")
        status = json.loads(site.malletrain("status", "--json").stdout)
        [share] = status["status"]["shares"]
        assert share["party"] == "all"
        (site.work / "stop").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
        site.until(lambda: not slurm.leases(), "every lease is given back")
        site.until(lambda: recounted(slurm), "Slurm has accounted for all of them")
        seconds, std = recounted(slurm)
        printed = site.malletrain("usage", "--by", "account", "--csv").stdout
        [row] = csv.DictReader(io.StringIO(printed))
        assert row["account"] == "all"
        near = pytest.approx(seconds, abs=0.01 * seconds + 3 * std)
        assert 3600 * float(row["leased_nh"]) == near
        parts = ("trained", "starting", "rescaling", "preempted", "unused")
        total = sum(float(row[f"{part}_nh"]) for part in parts)
        assert total == pytest.approx(float(row["leased_nh"]), rel=0.01)
        assert float(row["samples"]) == pytest.approx(site.job(job).samples)
