"""Texts as Slurm prints them, and a scavenger on imitated commands that print them: for tests
without a Slurm.
"""

from __future__ import annotations

import time
from pathlib import Path

from scavenger.batch.calls import CallLog
from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.lease_script import PLACE
from scavenger.batch.settings import BatchSettings
from scavenger.interface import LeaseRequest
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.scavenger import SlurmScavenger
from tests.scavenger.batch.fake_tools import FakeTools
from tests.waiting import PATIENCE_S

PREFIX = "malletrain-t-"
TEMPLATE = f'#!/bin/sh\n{PLACE}\nexec "$@"\n'
RECORDED = Path(__file__).parents[4] / "shared" / "slurm" / "outputs"
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
    "PartitionName=batch GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-8] PriorityTier=10 "
    "PreemptMode=OFF State=UP TotalNodes=8\n"
    "PartitionName=preemptable GraceTime=10 MaxTime=1-00:00:00 Nodes=n[1-8] PriorityTier=1 "
    "PreemptMode=CANCEL State=UP TotalNodes=8\n"
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
    return sinfo(
        *(
            f"{p}|up|{state}|(null)|(null)|{names}|none"
            for p in partitions
            for state, names in states.items()
        )
    )


def job(
    state: str,
    number: object,
    name: str,
    *,
    user: str = "me",
    partition: str = "",
    count: int = 1,
    submitted: object = "N/A",
    start: object = "N/A",
    end: object = "N/A",
    nodes: str = "",
    requested_nodes: str = "(null)",
    planned: str = "(null)",
    reason: str = "None",
    account: str = "(null)",
    batch: str = "n/a",
) -> str:
    """One line of squeue. A lease is in the partition of the leases unless another is named."""
    partition = partition or ("preemptable" if name.startswith("malletrain-") else "batch")
    times = "|".join(
        f"{t:.0f}" if isinstance(t, (int, float)) else str(t) for t in (submitted, start, end)
    )
    return f"MARK|{state}|{number}|{user}|{partition}|{count}|{times}|{nodes}|{requested_nodes}|{planned}|{reason}|{account}|{batch}|{name}\n"  # noqa: E501


class World:
    """A scavenger on imitated commands, with a clock of its own."""

    def __init__(self, root):
        self.now = 100_000.0
        self.tools = FakeTools(
            root / "bin", ("squeue", "sinfo", "scontrol", "sdiag", "sbatch", "scancel", "sacctmgr")
        )
        self.tools.runs(
            "scontrol",
            'case "$*" in *config*) cat "$here/config"; exit 0;; *partition*) cat '
            '"$here/partitions"; exit 0;; '
            '*) cat "$here/reservations"; exit 0;; esac',
        )
        self.tools.runs("sbatch", '[ -f "$here/sbatch.mode" ] || echo $$')
        self.file("config", CONFIG)
        self.file("partitions", PARTITIONS)
        self.file("reservations", "No reservations in the system\n")
        self.tools.answers("sdiag", "")
        self.queue("")
        self.nodes(idle="n[1-8]")

    def file(self, name, text):
        (self.tools.root / name).write_text(text)

    def queue(self, *jobs):
        self.tools.answers("squeue", "".join(jobs))

    def nodes(self, **states):
        self.tools.answers("sinfo", nodes(states))

    def scavenger(
        self, timeout_s=PATIENCE_S, tries=1, sleep=time.sleep, api="commands", **settings
    ):
        settings.setdefault("lease", SlurmLeaseOptions(partition="preemptable"))
        settings = {"submit_rate": 1000.0, "submit_burst": 1000.0, **settings}
        made = BatchSettings(tag="t", template=TEMPLATE, user="me", **settings)
        commands = Commands(
            CommandPolicy(timeout_s, tries, 0.0),
            self.tools.environment,
            sleep,
            CallLog(lambda: self.now),
        )
        return SlurmScavenger(
            made,
            commands,
            memory=GapMemory(),
            clock=lambda: self.now,
            api=api,
            environment=self.tools.environment,
        )

    def ready(self, **settings):
        """A scavenger for which all idle nodes have had their turn."""
        made = self.scavenger(**settings)
        made.poll()
        self.now += 60
        return made


def request(number, node=None, **options):
    return LeaseRequest(f"l{number}", node or f"n{number}", ("agent", "a b"), {"A": "1"}, **options)


def names(polled):
    return sorted(gap.node for gap in polled.gaps)


def why(polled, node):
    return {
        rule: sentence
        for e in polled.explanations
        if e.node == node
        for rule, passed, sentence in e.rules
        if not passed
    }
