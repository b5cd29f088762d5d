"""Texts as Slurm prints them, for tests without a Slurm."""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).parents[3] / "shared" / "slurm" / "outputs"
"""Output of a real Slurm 22.05, where it is at hand."""

CONFIG = """
ClusterName             = site
KillWait                = 5 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PrivateData             = none
SchedulerParameters     = bf_interval=2,bf_resolution=1
SchedulerType           = sched/backfill
SLURM_VERSION           = 22.05.8
SlurmctldParameters     = enable_configless,preempt_send_user_signal
"""

PARTITIONS = (
    "PartitionName=batch GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-8] PriorityTier=10 PreemptMode=OFF State=UP TotalNodes=8\n"
    "PartitionName=preemptable GraceTime=10 MaxTime=1-00:00:00 Nodes=n[1-8] PriorityTier=1 PreemptMode=CANCEL State=UP TotalNodes=8\n"
)

SDIAG = """
Main schedule statistics (microseconds):
\tLast cycle:   62
\tMean cycle:   122
Backfilling stats
\tLast cycle when: Fri Nov 20 17:41:44 2026 (1795196504)
\tLast cycle: 830000
\tMax cycle:  7300000
\tMean cycle: 132
"""


def sinfo(*lines: str) -> str:
    """Lines PARTITION|UP|STATE|FEATURES|GRES|NODES|REASON."""
    return "".join(f"MARK|{line}\n" for line in lines)


def nodes(states: dict[str, str], partitions: tuple[str, ...] = ("batch", "preemptable")) -> str:
    """One line for each state (state → nodes) and partition."""
    return sinfo(*(f"{p}|up|{state}|(null)|(null)|{names}|none" for p in partitions for state, names in states.items()))


def job(
    state: str, number: int, name: str, *, user: str = "me", partition: str = "batch", count: int = 1,
    submitted: object = "N/A", start: object = "N/A", end: object = "N/A",
    nodes: str = "", wanted: str = "(null)", planned: str = "(null)", reason: str = "None",
) -> str:  # fmt: skip
    """One line of squeue."""
    times = "|".join(f"{t:.0f}" if isinstance(t, (int, float)) else str(t) for t in (submitted, start, end))
    return f"MARK|{state}|{number}|{user}|{partition}|{count}|{times}|{nodes}|{wanted}|{planned}|{reason}|{name}\n"
