"""What ``malletrain assess`` reads of a real Slurm: its accounting, as text and as JSON, and its
hosts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from malletrain.assess.hosts import NODES_FILE, read_hosts
from malletrain.sim.accounting_logs import SACCT, read_sacct
from malletrain.sim.logged_jobs import Resources
from tests.slurm.test_slots import SHARED

ACCOUNTED = {**SHARED, "extra": f"{SHARED['extra']}AccountingStorageTRES=gres/gpu\n"}

AS_TEXT = SACCT.replace("FROM", "now-1hours").replace("TO", "now").split()
AS_JSON = ("sacct", "--allusers", "--duplicates", "--starttime=now-1hours", "--json")
"""Without a start, it is the last midnight."""


@pytest.fixture
def slurm(accounted):
    return accounted(2, **ACCOUNTED)


def test_text_and_json_of_the_accounting_say_the_same(slurm, tmp_path):
    gpus = {
        slurm.submit("sleep 2", f"--gres=gpu:{count}", "--cpus-per-task=2", "--mem=300"): count
        for count in (1, 3)
    }
    slurm.until(
        lambda: [slurm.jobs()[job][0] for job in gpus] == ["COMPLETED"] * 2, "the jobs complete"
    )
    slurm.until(lambda: slurm.run(*AS_TEXT).count("COMPLETED") == 2, "the accounting has them")
    (tmp_path / "text").write_text(slurm.run(*AS_TEXT, env_time="%s"))
    # With SLURM_TIME_FORMAT=%s the JSON of Slurm 22.05 is an error.
    (tmp_path / "json").write_text(slurm.run(*AS_JSON))
    text, listed = (
        [replace(job, line=0) for job in read_sacct(tmp_path / name).jobs]
        for name in ("text", "json")
    )
    assert text == listed
    assert {job.allocated for job in text} == {
        Resources(count, 2, 300 * 2**20) for count in gpus.values()
    }
    command = NODES_FILE.replace("'", "").split()
    (tmp_path / "nodes").write_text(slurm.run(*command))
    hosts = read_hosts(tmp_path / "nodes")
    assert {name: (host.gpus, host.cpus) for name, host in hosts.listed.items()} == {
        "n1": (4, 8),
        "n2": (4, 8),
    }


@pytest.mark.thorough
def test_a_job_that_is_resized_holds_each_of_its_sizes_in_turn(accounted, tmp_path):
    slurm = accounted(2)
    job = slurm.submit("sleep 3600", "--nodes=2", "--exclusive", "--time=60")

    def has_run_for_seconds():
        return slurm.run("squeue", "-h", "-t", "R", "-j", job, "-o", "%M").strip() > "0:01"

    slurm.until(has_run_for_seconds, "it runs")
    slurm.run("scontrol", "update", f"JobId={job}", "NumNodes=1")
    slurm.run("scancel", job)
    slurm.until(lambda: "CANCELLED" in slurm.run(*AS_TEXT), "the accounting has its end")
    (tmp_path / "text").write_text(slurm.run(*AS_TEXT, env_time="%s"))
    (tmp_path / "json").write_text(slurm.run(*AS_JSON))
    for name in ("text", "json"):
        large, *small = read_sacct(tmp_path / name).jobs
        assert large.names == ("n1", "n2")
        assert large.run_s is not None
        assert large.run_s > 0
        assert [each.names for each in small] == [("n1",)] * len(small)
        assert all(each.start_s == large.start_s + large.run_s for each in small)
