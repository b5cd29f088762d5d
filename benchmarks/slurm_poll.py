"""Measures what one poll of Slurm costs MalleTrain: reading the answers and finding the gaps, for
machines of up to 10,000 nodes.

    python -m benchmarks.slurm_poll [--nodes 10000] [--jobs 5000] [--json]

The answers are synthetic, in Slurm's format: three partitions, a thousand groups of nodes of
different states, waiting jobs with planned nodes, a lease on each tenth node. The duration of the
commands themselves is not measured (that needs a slurmctld of that size).
"""

from __future__ import annotations

import random

from benchmarks import poll
from benchmarks.poll import NOW, Row
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.lease_script import PLACE
from scavenger.batch.rules import GapRules
from scavenger.batch.settings import BatchSettings
from scavenger.hostlist import expand, fold
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.parse import (
    NodeTable,
    SlurmJobTable,
    SlurmReservation,
    read_jobs,
    read_nodes,
    read_reservations,
)
from scavenger.slurm.scavenger import SlurmScavenger
from scavenger.slurm.site import Partition, SlurmSite

MARK = "0123456789ab"


class Recorded:
    """Slurm's three answers, parsed anew at every poll."""

    name = "recorded"
    reason = ""

    def __init__(self, nodes: int, jobs: int, seed: int = 1) -> None:
        rng = random.Random(seed)
        names = [f"nid{i:05d}" for i in range(1, nodes + 1)]
        pieces: dict[str, list[str]] = {}
        states = (
            "idle",
            "allocated",
            "mixed",
            "planned",
            "drained",
            "down*",
            "completing",
            "idle*",
        )
        position = 0
        groups = 0
        while position < nodes:
            length = rng.randint(1, max(1, nodes // 500))
            group = f"{rng.choice(states)}|feature{groups % 50}|gpu:{groups % 4}"
            pieces.setdefault(group, []).extend(names[position : position + length])
            position += length
            groups += 1
        self.sinfo = "".join(
            f"{MARK}|{partition}|up|{group}|{fold(members)}|none\n"
            for partition in ("batch", "debug", "low")
            for group, members in pieces.items()
        )
        lines = []
        for number in range(jobs):
            first = rng.randrange(nodes)
            planned = fold(names[first : first + rng.randint(1, 100)]) if number < 200 else "(null)"
            start = f"{NOW + 60 * number:.0f}"
            lines.append(
                f"{MARK}|PENDING|{number}|user{number % 97}|batch|9|{NOW:.0f}|{start}|N/A|||{planned}|Priority|phys|n/a|job {number}"  # noqa: E501
            )
        times = f"{NOW:.0f}|{NOW:.0f}|{NOW + 9e4:.0f}"
        for number in range(nodes // 10):
            lines.append(
                f"{MARK}|RUNNING|{10**6 + number}|me|low|1|{times}|{names[10 * number]}|||None|phys|n/a|malletrain-t-l{number}"  # noqa: E501
            )
        lines += [
            f"{MARK}|RUNNING|{2 * 10**6 + n}|user{n % 97}|batch|4|{times}|nid1|||None|phys|n/a|x"
            for n in range(jobs)
        ]
        self.squeue = "\n".join(lines) + "\n"
        self.reservations = "".join(
            f"ReservationName=r{i} StartTime={NOW + 9e4:.0f} EndTime={NOW + 9.9e4:.0f} "
            f"Nodes={fold(names[i * 10 : i * 10 + 50])} Flags=\n"
            for i in range(20)
        )

    def read(self, prefix: str) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        """As scavenger.slurm.source.SlurmSource."""
        return (
            read_nodes(self.sinfo, MARK),
            read_jobs(self.squeue, MARK, prefix),
            read_reservations(self.reservations),
        )


def measure(nodes: int, jobs: int) -> Row:
    """Return the times of reading the answers (as at a first poll, and with known lists of nodes),
    and of the conclusions.
    """
    source = Recorded(nodes, jobs)
    settings = BatchSettings(
        "t",
        f"#!/bin/sh\n{PLACE}\n",
        SlurmLeaseOptions(),
        GapRules(use_planned=True),
        user="me",
        idle_for_s=0.0,
    )
    scavenger = SlurmScavenger(settings, source=source, memory=GapMemory(), clock=lambda: NOW)
    low = Partition("low", True, 1, "", 30.0, None)
    site = SlurmSite(
        (23, 11), "partition_prio", "REQUEUE", True, 30.0, 30.0, partitions={"low": low}
    )

    def first() -> None:
        expand.cache_clear()
        source.read(settings.prefix)

    result = poll.measure(
        scavenger, site, {"read, first": first, "read": lambda: source.read(settings.prefix)}
    )
    return {
        "mb": (len(source.squeue) + len(source.sinfo) + len(source.reservations)) / 1e6,
        **result,
    }


if __name__ == "__main__":
    poll.main(__doc__, measure)
