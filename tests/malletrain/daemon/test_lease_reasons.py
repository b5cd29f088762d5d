"""Why a job has no nodes is told in the words of the main scheduler, or of a lease that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from malletrain.daemon.site.backends import output_dir
from scavenger.interface import LeaseState
from tests.malletrain.daemon.forged import Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


class Slow(Imagined):
    """Its leases wait, for a reason."""

    begins = LeaseState.PENDING

    def take(self, requests):
        leases = super().take(requests)
        for lease in leases:
            self.leases[lease.id] = replace(lease, reason="MaxMemPerLimit")
        return leases


def test_a_job_says_what_its_leases_wait_for_and_why_the_last_one_failed(tmp_path):
    machine = Slow("n0")
    daemon = RunningDaemon(tmp_path, machine)
    try:
        job = daemon.submit("ann")
        words = "1 lease waits in the main scheduler (MaxMemPerLimit)"
        until(lambda: words in daemon.job(job).reason, "the scheduler's reason is told")
        [(lease, row)] = machine.leases.items()
        folder = output_dir(daemon.config)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{lease}.out").write_text("starting\nNo module named malletrain\n")
        machine.leases[lease] = replace(row, state=LeaseState.ENDED, reason="its command failed")

        def sentences():
            return [e.sentence for e in daemon.events() if e.kind == "lease-ended"]

        [sentence] = until(sentences, "the lease has ended")
        assert sentence == (
            "The lease ended: its command failed; it printed last: starting / "
            "No module named malletrain."
        )
        until(
            lambda: (
                "the last lease failed: its command failed" in daemon.job(job).reason
                or "MaxMemPerLimit" in daemon.job(job).reason
            ),
            "the job says so, until another lease waits",
        )
    finally:
        daemon.stop()
