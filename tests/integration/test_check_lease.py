"""``malletrain check --lease`` on an imitated PBS: the steps that it tells, and that the leases of
a daemon and the main scheduler's jobs stay.
"""

from __future__ import annotations

import json

import pytest

from tests.integration.test_main_job import STEADY
from tests.integration.test_pbs import PbsSite, pbs_site

SLOTS = """
[[scheduler.pbs.slots]]
name = "cpu"
cpus = 2
memory = "1 GiB"
"""


def trial(site: PbsSite) -> list[tuple[bool, str]]:
    """What ``check --lease`` says of the lease."""
    done = site.malletrain("check", "--lease", "--json", "--config", str(site.config))
    findings = json.loads(done.stdout)["findings"]
    steps = [(each["works"], each["sentence"]) for each in findings if each["what"] == "lease"]
    assert done.returncode == (0 if all(each["works"] for each in findings) else 1), done.stderr
    return steps


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param("", id="hosts"),
        pytest.param(SLOTS, id="slots", marks=pytest.mark.thorough),
    ],
)
def test_a_lease_of_pbs_is_taken_to_its_end_beside_a_daemon(tmp_path, lines):
    with pbs_site(tmp_path, hosts=2, lines=lines) as site:
        main = site.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
        site.pbs.until(lambda: site.pbs.jobs()[main]["state"] == "R", "a main job has a host")
        job = site.submit(site.script("steady.py", STEADY), nodes=(1, 1))
        site.until(lambda: site.job(job).nodes, "the daemon's job runs")
        site.until_samples(job, 20)
        leases = set(site.pbs.leases())
        site.pbs.edit(lambda state: state["jobs"][main].update(delete=True))
        site.pbs.until(lambda: site.pbs.jobs()[main]["state"] == "F", "a host is idle")
        steps = trial(site)
        assert [works for works, _ in steps] == [True] * 4, steps
        assert "became a gap" in steps[0][1]
        assert "was taken as job" in steps[1][1]
        assert "It ended within" in steps[3][1]
        assert set(site.pbs.leases()) == leases, "the daemon's lease stays, and no other does"
        site.until_samples(job, site.job(job).samples + 20)
        (site.work / "stop").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
        site.until(lambda: not site.pbs.leases(), "the daemon gives its lease back")


def test_a_lease_that_pbs_refuses_is_told_in_its_words(tmp_path):
    with pbs_site(tmp_path, hosts=1) as site:
        site.pbs.tools.fails("qsub", "qsub: Unauthorized Request")
        steps = trial(site)
        assert steps[-1][0] is False
        assert "Unauthorized Request" in steps[-1][1]
        site.pbs.works("qsub")
        assert not site.pbs.leases()
