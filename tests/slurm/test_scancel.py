"""An ordinary scancel of a lease: Slurm sends SIGTERM to every process of it at once, and SIGKILL
after KillWait.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration.test_main_job import COUNTING
from tests.slurm.site import slurm_site


@pytest.mark.thorough
def test_a_lease_that_an_admin_cancels_lets_its_job_save(cluster, root):
    slurm = cluster(2, kill_wait=600, grace=600)  # steps of 2 s must fit in
    with slurm_site(root / "s", slurm) as site:
        script = site.script("counting.py", COUNTING)
        job = site.submit(script, nodes=(2, 2), name="count")
        site.until_samples(job, 100)
        slurm.run("scancel", next(iter(slurm.leases())))
        site.until(lambda: site.events("node-leaving"), "the notice is heard of")
        site.until(lambda: len(site.events("round-formed", job)) >= 2, "the job goes on")
        (site.work / "go").touch()
        done = site.until_state(job, "completed", "failed")
        assert (done.state, done.tries) == ("completed", 0), site.show(job).failure
    seen = Counter(n for path in site.work.glob("seen-*") for n in path.read_text().split())
    assert len(seen) == 2000
    assert set(seen.values()) == {1}, "what was done before the scancel was saved"
