"""A main-partition workload, replayed at speed, and how long each of its jobs waited."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import SlurmCluster


@dataclass(frozen=True)
class MainJob:
    """``arrival`` seconds after the begin; ``nodes`` for ``seconds``."""

    arrival: float
    nodes: int
    seconds: float


def replay(slurm: SlurmCluster, jobs: Sequence[MainJob], out: Path) -> list[float]:
    """Submit the jobs when they are due, wait until all are done; returns the seconds each waited
    for its start, by its own clock.
    """
    out.mkdir(parents=True)
    begin = time.time()
    submitted: list[float] = []
    ids = []
    for number, job in enumerate(jobs):
        time.sleep(max(0.0, begin + job.arrival - time.time()))
        submitted.append(time.time())
        ids.append(
            slurm.submit(
                f"date +%s.%N >{out}/{number}.new; mv {out}/{number}.new {out}/{number}; sleep "
                f"{job.seconds}",
                f"--nodes={job.nodes}", "--exclusive", "--time=2", f"--job-name=main-{number}",
            )
        )  # fmt: skip
    slurm.until(
        lambda: all(slurm.jobs()[i][0] == "COMPLETED" for i in ids),
        "every main job has completed",
    )
    waits = []
    for number in range(len(jobs)):
        with contextlib.suppress(FileNotFoundError):
            waits.append(float((out / str(number)).read_text()) - submitted[number])
    assert len(waits) == len(jobs)
    return waits
