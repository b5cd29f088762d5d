"""The same farm by Slurm's own job array, by HyperQueue and by MalleTrain.

Part of :mod:`benchmarks.farm` (``--peers``). A real Slurm of ``--nodes`` nodes runs on this
machine; a node has as many cores as this machine. Main jobs of whole nodes come and go
(benchmarks/main_jobs.py) and preempt the preemptable partition, in which the contenders work, one
after another. A task has one core, and sleeps for 0.5 to 20 s. All contenders are measured from the
records that tasks and main jobs write (benchmarks/farm_account.py).

Where the comparison is uneven:

* The scheduler decides every two seconds at the latest, far more often than at most sites. That
  favours the array, which needs a decision for each task.
* A task of the array is a job: on a machine of two cores, starting it costs more of the time than
  on a real controller.
* All nodes share this machine's cores. A node of MalleTrain starts three Python processes, one of
  HyperQueue one; on real nodes they start side by side.
* HyperQueue's program ``hq`` is not in the package index. Its server, scheduler and workers run
  from its Python package, and its automatic allocator is imitated: a loop looks once a second and
  keeps a job of one node in the queue for each node. It counts a task that the end of a worker's
  job terminates as failed; such tasks are submitted again when the others have ended.
* A task of the array goes on during the grace time, because Slurm does not signal its script. One
  of MalleTrain has the option --drain for that, and a part of the grace time.
* A requeued task of the array waits for two minutes, Slurm's default; one of the others does not.
* The polling of MalleTrain's daemon is set to 1 s (5 s by default), as for HyperQueue.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.farm_account import Account, account, tries_of
from benchmarks.farm_contenders import CONTENDERS, Field, NotInstalled
from benchmarks.main_jobs import MainJob, Player, workload
from benchmarks.slurm_site import SCHEDULER, submissions
from tests.slurm.cluster import SlurmCluster

SHORTEST_S, LONGEST_S = 0.5, 20.0
"""Length of a task, seconds."""
LOAD = 0.5
"""Share of the machine that main jobs request."""
TRACE_S = 3600.0
KILL_WAIT_S = 2
CRED_EXPIRE_S = 120
"""Time before a requeued job can start again, seconds: Slurm's default."""
POLL_S = 0.1
TARGET_TIME, TARGET_WASTE = 0.7, 0.3
REFERENCE, PRODUCT = "array", "malletrain"
CLUSTER = {
    "select": "select/cons_tres\nSelectTypeParameters=CR_Core",
    "scheduler": SCHEDULER,
    "lease_mode": "PreemptMode=REQUEUE",
    "kill_wait": KILL_WAIT_S,
    "cred_expire": CRED_EXPIRE_S,
    "min_job_age": 60,
}


def lengths(tasks: int, scale: float, seed: int) -> list[float]:
    """Return the seconds that each task takes."""
    rng = random.Random(seed)
    return [scale * rng.uniform(SHORTEST_S, LONGEST_S) for _ in range(tasks)]


def run(
    name: str,
    seconds: Sequence[float],
    trace: Sequence[MainJob],
    *,
    nodes: int,
    grace_s: int,
    limit_s: float,
    longest_s: float,
) -> dict[str, Any]:
    """Run the farm with one contender on its own Slurm. Return its results.

    Args:
        name: the contender.
        seconds: the length of each task.
        trace: the main jobs.
        nodes: number of nodes.
        grace_s: the grace time of a preemption.
        limit_s: time after which the farm is given up, seconds.
        longest_s: maximum length of a task, seconds.

    Raises:
        NotInstalled: the contender is not available.
        RuntimeError: Slurm refused a main job, or the trace was too short.
    """
    root = Path(tempfile.mkdtemp(prefix="mt-farm-", dir="/tmp"))
    root.chmod(0o755)
    cores = len(os.sched_getaffinity(0))
    try:
        for part in ("tries", "done", "main", "contender"):
            (root / part).mkdir()
        (root / "lengths").write_text(" ".join(f"{each:.3f}" for each in seconds))
        task = str(Path(__file__).parent / "farm_task.py")
        command = (sys.executable, "-I", "-S", task, str(root), "{}")
        with SlurmCluster(root / "slurm", nodes, grace=grace_s, cpus=cores, **CLUSTER) as slurm:
            folder, done = root / "contender", root / "done"
            field = Field(slurm, folder, cores, len(seconds), done, command, longest_s)
            player = Player(slurm, trace, root / "main")
            try:
                with CONTENDERS[name](field) as submit:
                    player.start()
                    begin = time.time()
                    submit()
                    while len(os.listdir(done)) < len(seconds):
                        if time.time() > begin + limit_s:
                            break
                        time.sleep(POLL_S)
                    if player.played:
                        raise RuntimeError(
                            "The trace of main jobs ended before the work; make it longer."
                        )
                    count = submissions(slurm) - player.submitted
            finally:
                records = player.stop()
        tries = list(tries_of(root / "tries"))
        result = account(tries, records, begin=begin, nodes=nodes, cores=cores, tasks=len(seconds))
        return {"contender": name, **asdict(result), "submissions": count}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return MalleTrain's time and waste as fractions of the array's, where both did all tasks."""
    row_of = {row["contender"]: row for row in rows if "seconds" in row}
    if not {REFERENCE, PRODUCT} <= set(row_of):
        return {}
    product, reference = row_of[PRODUCT], row_of[REFERENCE]
    if product["done"] != reference["done"]:
        return {}
    return {
        name: product[name] / reference[name]
        for name in ("seconds", "wasted_node_s")
        if reference[name]
    }


def compare(
    contenders: Sequence[str],
    *,
    tasks: int,
    nodes: int,
    scale: float,
    grace_s: int,
    seed: int,
    limit_s: float,
    console: Console,
) -> dict[str, Any]:
    """Run the same farm with each contender in turn. Return all figures."""
    seconds, trace = lengths(tasks, scale, seed), workload(nodes, TRACE_S, LOAD, seed)
    rows: list[dict[str, Any]] = []
    for name in contenders:
        try:
            row = run(
                name,
                seconds,
                trace,
                nodes=nodes,
                grace_s=grace_s,
                limit_s=limit_s,
                longest_s=scale * LONGEST_S,
            )
        except NotInstalled as reason:
            row = {"contender": name, "missing": str(reason)}
        rows.append(row)
        console.print(row)
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "nodes": nodes,
        "tasks": tasks,
        "task_s": sum(seconds),
        "scale": scale,
        "grace_s": grace_s,
        "seed": seed,
        "rows": rows,
        "ratios": ratios(rows),
    }


COLUMNS = (
    ("done", "done", "{:,}"),
    ("time, s", "seconds", "{:.0f}"),
    ("thrown away, node-s", "wasted_node_s", "{:.0f}"),
    ("run again", "repeated", "{}"),
    ("done twice", "done_twice", "{}"),
    ("idle beside waiting tasks, node-s", "idle_node_s", "{:,.0f}"),
    ("main jobs", "main_jobs", "{}"),
    ("their wait, mean, s", "main_wait_mean_s", "{:.1f}"),
    ("median, s", "main_wait_median_s", "{:.1f}"),
    ("p99, s", "main_wait_p99_s", "{:.1f}"),
    ("longest, s", "main_wait_max_s", "{:.1f}"),
    ("submissions", "submissions", "{}"),
)


def show(figures: dict[str, Any], console: Console) -> None:
    """Print a table, and the ratios beside their targets."""
    table = Table("", *(title for title, _, _ in COLUMNS))
    for row in figures["rows"]:
        if "missing" in row:
            console.print(f"{row['contender']}: {row['missing']}")
        else:
            table.add_row(row["contender"], *(form.format(row[key]) for _, key, form in COLUMNS))
    console.print(table)
    targets = {"seconds": ("time", TARGET_TIME), "wasted_node_s": ("thrown away", TARGET_WASTE)}
    for key, ratio in figures["ratios"].items():
        name, target = targets[key]
        console.print(f"malletrain / array, {name}: {ratio:.2f} (target: at most {target})")


__all__ = ["Account", "compare", "show"]
