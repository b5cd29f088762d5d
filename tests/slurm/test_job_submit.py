"""A real Slurm with a job_submit plugin that changes the names of jobs."""

from __future__ import annotations

from pathlib import Path

from scavenger.interface import LeaseRequest, LeaseState
from tests.slurm import cluster as slurm_cluster
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import skip_for
from tests.slurm.test_leases import gaps, scavenger, states

RENAME = """
function slurm_job_submit(job_desc, part_list, submit_uid)
  if job_desc.name ~= nil then job_desc.name = "proj_" .. job_desc.name .. "_x" end
  return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


class RenamingCluster(SlurmCluster):
    """A Slurm that puts text before and behind the name of each job."""

    def start(self):
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "job_submit.lua").write_text(RENAME)
        return super().start()


def test_a_lease_that_a_plugin_renames_is_known_and_given_back(cluster):
    folder = Path(slurm_cluster.tested_prefix() or "/usr")
    if not any(folder.glob("lib*/**/job_submit_lua.so")):
        skip_for("this Slurm has no job_submit/lua")
    slurm = cluster(2, kind=RenamingCluster, extra="JobSubmitPlugins=lua")
    one = scavenger(slurm)
    slurm.until(lambda: gaps(one) == ["n1", "n2"], "the nodes are gaps")
    [lease] = one.take([LeaseRequest("l1", "n1", ("sleep", "600"))])
    slurm.until(lambda: states(one)["l1"] is LeaseState.RUNNING, "the lease runs")
    assert slurm.jobs()[lease.scheduler_id][2] == "proj_malletrain-t-l1_x"
    assert gaps(one) == ["n2"]
    one.give_back([lease])
    slurm.until(lambda: states(one)["l1"] is LeaseState.ENDED, "the lease is cancelled")
    slurm.until(lambda: not slurm.run("squeue", "-h").strip(), "no job is left")
