"""Records what a real Slurm prints, for tests that read it without one:
``MALLETRAIN_TEST_SLURM=PREFIX python -m tests.slurm.record FILE``.

Four nodes with four GPUs each. A main job has one GPU of n1, where another one waits for the whole
node; a lease has n2, and a main job preempts it after the first answers are recorded; n3 is
drained, and n4 is in a maintenance reservation in an hour. Of the configuration and of what differs
from machine to machine only that is kept which is read.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from malletrain.sim.accounting_logs import SACCT
from scavenger.slurm.associations import ASSOCIATIONS
from scavenger.slurm.hosts import HOSTS
from scavenger.slurm.parse import SINFO_FIELDS, SQUEUE_FIELDS, STEP_FIELDS
from tests.slurm.accounting import AccountedCluster
from tests.slurm.test_slots import SHARED

SQUEUE = ("squeue", "-h", "-a", "-t", "all", "-o", f"MARK|{SQUEUE_FIELDS}")
QUESTIONS = {
    "sinfo": ("sinfo", "-h", "-a", "-o", f"MARK|{SINFO_FIELDS}"),
    "squeue": SQUEUE,
    "steps": ("squeue", "-h", "-s", "-o", STEP_FIELDS),
    "config": ("scontrol", "show", "config"),
    "partitions": ("scontrol", "show", "partition", "-o"),
    "nodes": HOSTS,
    "reservations": ("scontrol", "show", "reservation", "-o"),
    "sdiag": ("sdiag",),
    "associations": ("sacctmgr", "-nP", "show", "associations", f"format={','.join(ASSOCIATIONS)}"),
    "users": ("sacctmgr", "-nP", "show", "user", "format=user,defaultaccount"),
    "qos": ("sacctmgr", "-nP", "show", "qos", "format=name,preemptexempttime"),
}
SETTINGS = re.compile(
    r"^(?:ClusterName|SLURM_VERSION|SchedulerType|SchedulerParameters|Preempt\w+|KillWait"
    r"|PrivateData|MaxArraySize|SelectType\w*|TaskPlugin|AccountingStorage(?:Type|Enforce)"
    r"|SlurmUser|SlurmctldParameters) *=.*$",
    re.MULTILINE,
)
JOB_KEYS = ("job_id", "time", "nodes", "allocation_nodes", "state", "tres")


def record(slurm: AccountedCluster) -> dict[str, str]:
    """Name of each question → the answer."""
    one_gpu = ("--nodelist=n1", "--gres=gpu:1", "--cpus-per-task=2", "--mem=300")
    main = slurm.submit("sleep 600", *one_gpu)
    lease = slurm.submit(
        "sleep 600",
        "--job-name=malletrain-t-l1",
        "--nodelist=n2",
        "--exclusive",
        "--mem=0",
        "--no-requeue",
        partition="preemptable",
    )
    slurm.until(
        lambda: [slurm.jobs()[job][0] for job in (main, lease)] == ["RUNNING"] * 2, "both run"
    )
    slurm.submit("true", "--job-name=a|b", "--nodelist=n1", "--exclusive")
    slurm.until(lambda: "|Resources|" in slurm.run(*SQUEUE), "a main job waits for resources")
    slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan of n3")
    slurm.run(
        *("scontrol", "create", "reservation", "ReservationName=r1", "Users=root", "Nodes=n4"),
        *("StartTime=now+1hours", "Duration=10", "Flags=MAINT"),
    )
    answers = {name: slurm.run(*argv, env_time="%s") for name, argv in QUESTIONS.items()}
    slurm.submit("true", "--nodelist=n2", "--exclusive")
    slurm.until(lambda: slurm.jobs()[lease][0] == "PREEMPTED", "the lease is preempted")
    answers["squeue preempted"] = slurm.run(*SQUEUE, env_time="%s")
    slurm.run("scancel", main)
    sacct = SACCT.replace("FROM", "now-1hours").replace("TO", "now").split()
    slurm.until(lambda: len(slurm.run(*sacct).splitlines()) >= 5, "the accounting has four jobs")
    slurm.until(lambda: "RUNNING" not in slurm.run(*sacct), "all have ended there")
    answers["sacct"] = slurm.run(*sacct, env_time="%s")
    listed = json.loads(slurm.run("sacct", "--allusers", "--duplicates", "--json"))["jobs"]
    jobs = [{key: job[key] for key in JOB_KEYS} for job in listed]
    return {
        **answers,
        "config": "\n".join(SETTINGS.findall(answers["config"])) + "\n",
        "nodes": re.sub(r" OS=.*?(?= +RealMemory=)", "", answers["nodes"]),
        "sacct json": json.dumps({"jobs": jobs}),
    }


def main(path: Path) -> None:
    """Write the answers of the Slurm under test to ``path``."""
    root = Path(tempfile.mkdtemp(prefix="mt-slurm-", dir="/tmp"))
    root.chmod(0o755)
    try:
        with AccountedCluster(root / "c", 4, **SHARED) as slurm:
            path.write_text(json.dumps(record(slurm), indent=1) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
