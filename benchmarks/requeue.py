"""MalleTrain beside what Slurm does with preemption and requeue alone.

    python -m benchmarks.requeue [--contenders none job rigid-4 array restart live] [--nodes 16]
                                 [--minutes 8] [--trainings 1] [--step-s 1] [--load 0.5]
                                 [--grace 10] [--cred-expire 120] [--seed 1] [--json]

A real Slurm of ``--nodes`` nodes runs on this machine. Main jobs of whole nodes come and go
(benchmarks/main_jobs.py) and preempt the preemptable partition, in which the contenders train, one
after another, beside the same main jobs. All train the same model on the same data in steps of the
same batch size for each node (benchmarks/requeue_training.py), with the exact sampler, and all
write a checkpoint each minute and when they are to leave.

* ``none``: nobody; the waits of main jobs beside the others are compared with it.
* ``job``: a job of one node with ``--requeue``, which writes a checkpoint on SIGTERM.
* ``rigid-2``, ``rigid-4``, ``rigid-8``: the same on so many nodes (DDP over gloo).
* ``array``: a job array of the same one-node jobs, as many as nodes. Each is a training of its own.
* ``submitit``: a function on ``--library-nodes`` nodes, which submitit requeues after it has called
  its ``checkpoint()``. Its environment is kept below ~/.cache/malletrain/benchmarks.
* ``lightning``: Lightning's Trainer on as many nodes; its ``SLURMEnvironment`` saves and requeues.
* ``restart``, ``live``: MalleTrain, in both modes, on 1 to all nodes.

With ``--trainings 10`` each contender has ten trainings (``array``: ten elements), all submitted at
the beginning.

**A step has a wait in the place of an accelerator**: it computes the gradient for its 32 samples
on the processor (some 10 ms) and then waits for ``--step-s`` seconds, so that 16 nodes on one
machine of few cores train 16 times as fast as one. All that follows is measured with that wait.

Reported for each contender (benchmarks/requeue_account.py): samples, and those of the training that
came furthest; the share of the idle node-seconds, in all gaps and in those longer than 60 s, in
steps that counted; work thrown away; downtime of a training; time from the release of a node to the
begin of the first step on it; the wait that was added to main jobs; submissions to Slurm.

Where the comparison is uneven:

* The scheduler decides every two seconds at the latest, far more often than at most sites. That
  favours the others, which need a decision of it for each start.
* The site signals a job when it is preempted (``preempt_send_user_signal``), and the grace time is
  long enough to save. That favours the others too: by default a job of Slurm has no grace time.
* A requeued job waits for two minutes, Slurm's default (``cred_expire``); ``--cred-expire``.
* All nodes share this machine's cores. A start of the others imports torch, two to three seconds of
  a core; a node of MalleTrain imports it once for each lease and starts an agent beside it.
* With more nodes a training's global batch is larger. What that means for the number of steps
  until it has learnt is not part of the comparison.
* The polling of MalleTrain's daemon is set to 1 s (5 s by default). Its scaling curve is given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

from benchmarks import end_in_order
from benchmarks.main_jobs import MainJob, Player, workload
from benchmarks.requeue_account import account, added_wait, records_of, waits_of
from benchmarks.requeue_contenders import CONTENDERS, PEERS, PRODUCT, Field
from benchmarks.requeue_training import write_digits
from benchmarks.slurm_site import SCHEDULER, submissions
from tests.slurm.cluster import SlurmCluster, missing

KILL_WAIT_S = 2
POLL_S = 0.5
SPARE_S = 120.0
"""Additional length of a trace beyond the run, seconds."""
CONTROL = "none"
TARGET_SAMPLES, TARGET_THROWN_AWAY = 2.0, 1 / 3
CLUSTER = {
    "scheduler": SCHEDULER,
    "lease_mode": "PreemptMode=REQUEUE",
    "kill_wait": KILL_WAIT_S,
    "min_job_age": 60,
}


def number_of_trainings(contender: str, trainings: int, nodes: int) -> int:
    """Return how many trainings a contender has: a job array has one per node if the others have
    one.
    """
    return nodes if contender == "array" and trainings == 1 else trainings


def run(name: str, trace: Sequence[MainJob], options: argparse.Namespace) -> dict[str, Any]:
    """Let one contender train beside the main jobs on its own Slurm. Return its results.

    Args:
        name: the contender.
        trace: the main jobs.
        options: options of the command line.

    Raises:
        RuntimeError: the contender is not available, or did not start; Slurm refused a main job.
    """
    root = Path(tempfile.mkdtemp(prefix="mt-requeue-", dir="/tmp"))
    root.chmod(0o755)
    trainings = number_of_trainings(name, options.trainings, options.nodes)
    try:
        for part in ("steps", "checkpoints", "main", "contender"):
            (root / part).mkdir()
        write_digits(root)
        arguments = [str(root), "--checkpoints", str(root / "checkpoints")]
        arguments += ["--step-s", str(options.step_s), "--max-ranks", str(options.nodes)]
        setting = {**CLUSTER, "grace": options.grace, "cred_expire": options.cred_expire}
        with SlurmCluster(root / "slurm", options.nodes, **setting) as slurm:
            field = Field(
                slurm,
                root / "contender",
                trainings,
                tuple(arguments),
                options.step_s,
                options.library_nodes,
            )
            player = Player(slurm, trace, root / "main")
            try:
                with CONTENDERS[name](field) as submit:
                    player.start()
                    begin = time.time()
                    submit()
                    while time.time() < begin + 60 * options.minutes:
                        player.check()
                        time.sleep(POLL_S)
                    end, load = time.time(), os.getloadavg()[0]
                    count = submissions(slurm) - player.submitted
                    main = player.records()
            finally:
                player.stop()
            nodes = slurm.nodes
        figures = account(
            records_of(root / "steps"),
            main,
            begin=begin,
            end=end,
            nodes=nodes,
            trainings=trainings,
        )
        return {
            "contender": name,
            "trainings": trainings,
            **asdict(figures),
            "submissions": count,
            "load": load,
            "main_waits_s": waits_of(main, end),
        }
    finally:
        if options.keep:
            print(f"{name}: {root}", file=sys.stderr)
        else:
            shutil.rmtree(root, ignore_errors=True)


def with_added_waits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the wait that each contender added to the main jobs, if they were also
    run alone.
    """
    alone = next((row["main_waits_s"] for row in rows if row["contender"] == CONTROL), None)
    added = []
    for row in rows:
        if alone is None or "main_waits_s" not in row:
            added.append(row)
            continue
        mean_s, longest_s = added_wait(row["main_waits_s"], alone)
        added.append({**row, "added_wait_mean_s": mean_s, "added_wait_max_s": longest_s})
    return added


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of MalleTrain as fractions of those of the peer with the most samples, and
    its furthest training as a fraction of the furthest of the peers.
    """
    measured = {row["contender"]: row for row in rows if "samples" in row}
    peers = [measured[name] for name in PEERS if name in measured]
    if not peers:
        return {}
    best = max(peers, key=lambda row: int(row["samples"]))
    furthest = max(int(row["furthest"]) for row in peers)
    compared: dict[str, Any] = {"best": best["contender"]}
    for name in (name for name in PRODUCT if name in measured):
        row = measured[name]
        keys = ("samples", "thrown_away_node_s", "downtime_s")
        compared[name] = {key: row[key] / best[key] for key in keys if best[key]}
        if furthest:
            compared[name]["furthest"] = row["furthest"] / furthest
    return compared


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Let each contender train in turn. Return all figures."""
    seconds = 60 * options.minutes + SPARE_S
    trace = workload(options.nodes, seconds, options.load, options.seed)
    rows: list[dict[str, Any]] = []
    for name in options.contenders:
        try:
            rows.append(run(name, trace, options))
        except RuntimeError as reason:
            rows.append({"contender": name, "missing": str(reason)})
        console.print({k: v for k, v in rows[-1].items() if k != "main_waits_s"}, highlight=False)
    rows = with_added_waits(rows)
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "setting": {k: v for k, v in vars(options).items() if k not in ("json", "contenders")},
        "rows": rows,
        "ratios": ratios(rows),
    }


COLUMNS = (
    ("samples", "samples", "{:,}"),
    ("of one training", "furthest", "{:,}"),
    ("idle time trained on", "trained_share", "{:.1%}"),
    ("in gaps > 60 s", "long_trained_share", "{:.1%}"),
    ("thrown away, node-s", "thrown_away_node_s", "{:.0f}"),
    ("thrown away, samples", "thrown_away_samples", "{:,}"),
    ("downtime, s", "downtime_s", "{:.0f}"),
    ("release to first step, s", "first_step_median_s", "{:.1f}"),
    ("p90", "first_step_p90_s", "{:.1f}"),
    ("releases used", "releases_used", "{}"),
    ("of", "releases", "{}"),
    ("main jobs wait, s", "main_wait_mean_s", "{:.1f}"),
    ("longest", "main_wait_max_s", "{:.1f}"),
    ("added, mean", "added_wait_mean_s", "{:.1f}"),
    ("submissions", "submissions", "{}"),
    ("load", "load", "{:.1f}"),
)


def show(figures: dict[str, Any], console: Console) -> None:
    """Print a table, and the ratios beside their targets."""
    rows = [row for row in figures["rows"] if "missing" not in row]
    table = Table("", *(row["contender"] for row in rows))
    for title, key, form in COLUMNS:
        values = (row.get(key) for row in rows)
        table.add_row(title, *("" if value is None else form.format(value) for value in values))
    console.print(table)
    for row in figures["rows"]:
        if "missing" in row:
            console.print(f"{row['contender']}: {row['missing']}")
    compared = dict(figures["ratios"])
    best = compared.pop("best", "")
    for name, each in compared.items():
        for key, ratio in each.items():
            target = {
                "samples": f" (target: at least {TARGET_SAMPLES:g})",
                "thrown_away_node_s": f" (target: at most {TARGET_THROWN_AWAY:.2f})",
            }.get(key, "")
            other = "the furthest" if key == "furthest" else best
            console.print(f"{name} / {other}, {key}: {ratio:.2f}{target}")


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS)
    )
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=8.0, help="of each contender")
    parser.add_argument("--trainings", type=int, default=1, help="1, or a stream such as 10")
    parser.add_argument(
        "--library-nodes", type=int, default=4, help="of a job of submitit and of Lightning"
    )
    parser.add_argument("--step-s", type=float, default=1.0, help="wait in every step, seconds")
    parser.add_argument(
        "--load", type=float, default=0.5, help="share of the machine that main jobs request"
    )
    parser.add_argument("--grace", type=int, default=10, help="of a preemption, seconds")
    parser.add_argument(
        "--cred-expire", type=int, default=120, help="seconds that a requeued job waits"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the main jobs")
    parser.add_argument("--keep", action="store_true", help="keep logs and records, and say where")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    figures = compare(options, Console(stderr=True))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures, Console(width=None if sys.stdout.isatty() else 160))
    return 0


if __name__ == "__main__":
    sys.exit(main())
