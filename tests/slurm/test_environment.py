"""A real Slurm and a user whose environment changes what its commands do and print."""

from __future__ import annotations

import getpass

from scavenger.batch.settings import BatchSettings
from scavenger.interface import LeaseRequest, LeaseState
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.scavenger import SlurmScavenger
from tests.slurm.test_leases import TEMPLATE, gaps, states
from tests.waiting import PATIENCE_S

OF_A_USER = {
    "LANG": "de_DE.ISO-8859-1",
    "LC_ALL": "de_DE.ISO-8859-1",
    "POSIXLY_CORRECT": "1",  # options behind the first operand are operands
    "SBATCH_ARRAY_INX": "1-9",
    "SBATCH_CLUSTERS": "elsewhere",
    "SBATCH_DEBUG": "5",
    "SBATCH_EXCLUSIVE": "user",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_GRES": "gpu:9",
    "SBATCH_PARTITION": "batch",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_WAIT": "1",
    "SCANCEL_CTLD": "1",
    "SCANCEL_INTERACTIVE": "1",
    "SCONTROL_FUTURE": "1",
    "SINFO_FORMAT": "%n",
    "SINFO_PARTITION": "none",
    "SLURM_CLUSTERS": "elsewhere",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_HINT": "nomultithread",
    "SLURM_JOB_ID": "99999",
    "SLURM_NODELIST": "none",
    "SLURM_TIME_FORMAT": "relative",
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_PARTITION": "none",
    "SQUEUE_STATES": "PENDING",
    "SQUEUE_USERS": "nobody",
    "TZ": "Asia/Kolkata",
}


def test_no_variable_of_a_user_changes_what_is_read_and_requested(cluster, root):
    slurm = cluster(1)
    settings = BatchSettings(
        tag="t",
        template=TEMPLATE,
        lease=SlurmLeaseOptions(partition="preemptable"),
        idle_for_s=0.0,
        start_within_s=PATIENCE_S,
        hold_s=0.5,
        user=getpass.getuser(),
    )
    one = SlurmScavenger(settings, environment={**slurm.environment, **OF_A_USER})
    assert all(works for works, _ in one.check()), one.check()
    slurm.until(lambda: gaps(one) == ["n1"], "the node is a gap")
    dumped = root / "environment"
    command = ("/bin/sh", "-c", f"env >{dumped}.new; mv {dumped}.new {dumped}; sleep 600")
    one.take([LeaseRequest("l1", "n1", command)])
    slurm.until(lambda: states(one)["l1"] is LeaseState.RUNNING, "the lease runs")
    slurm.until(dumped.exists, "its command runs")
    names = {line.partition("=")[0] for line in dumped.read_text().splitlines()}
    assert "TZ" in names, "the rest of the environment is that of the user"
    assert names.isdisjoint({"SLURM_HINT", "SLURM_CPU_BIND", "SBATCH_GRES"})
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "the lease is cancelled")
