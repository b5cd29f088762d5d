"""No harm on a real Slurm: the same main workload with and without MalleTrain, and what MalleTrain
harvests beside it.

    python -m benchmarks.noharm [--nodes 64] [--minutes 8] [--repeats 2] [--load 0.85]
                                [--shapes single array block] [--lease-nodes 8] [--json]
    python -m benchmarks.noharm --slots     (see benchmarks/noharm_slots.py)
    python -m benchmarks.noharm --bound     (see benchmarks/noharm_bound.py)

A Slurm of that many nodes runs on this machine (needs its packages, see tests/slurm/install.sh).
The main workload is drawn at random: jobs of 1 node to half the machine, 20 s to 5 min, with time
limits of one to four times what they need. Reported are the start delays of the main jobs
(submission to first command) in both runs, and the share of idle node-seconds in gaps longer than a
minute in which a malleable job worked.

What is real: slurmctld, backfill and preemption, the daemon, its leases and agents, plans, rounds,
progress reports. What is not: the malleable jobs are stubs (benchmarks/stub_launcher.py) that
report and compute nothing, because 64 times torch do not fit on a small machine; a real job pays
its start and its rescales on top (benchmarks/rescale.py). The replay begins when stubs work on all
nodes. Delays have a floor of some 0.1 s, the start of a job in Slurm. A repeat takes twice the
minutes and about five more. Several shapes of leases are compared with one control run; what each
asks of Slurm is counted by sdiag.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import end_in_order, main_jobs, noharm_bound, noharm_slots
from benchmarks.main_jobs import MainJob, drawn
from benchmarks.noharm_account import Harvest, MainRun, account, gaps_of, harvest_of, summary
from benchmarks.slurm_site import (
    SCHEDULER,
    nodes_leased,
    running_daemon,
    submissions,
    submit_stubs,
)
from malletrain.client import Connection
from malletrain.demo.account import length, normal
from tests.slurm.cluster import SlurmCluster, missing

LONG_GAP_S = 60.0
TARGET = 0.85
GRACE_S = 10.0
KILL_WAIT_S = 2.0
CONFIG = """
[daemon]
state_dir = "{state}"
metrics_listen = ""
heartbeat = "2 s"
agent_timeout = "20 s"
[scheduler]
kind = "slurm"
poll_interval = "1 s"
[scheduler.slurm]
partition = "preemptable"
time_min = "1 min"
spare = "5 s"
lease_shape = "{shape}"
lease_nodes = {lease_nodes}
[gaps]
use_planned = true
[jobs]
stop_grace = "1 s"
drain_timeout = "1 s"
[allocation]
debounce = "0.5 s"
min_interval = "5 s"
rescale_up = "1 s"
rescale_down = "1 s"
start = "1 s"
release_after = "1 h"
[profiling]
enabled = false
"""


def workload(nodes: int, minutes: float, load: float, seed: int) -> list[MainJob]:
    """Return jobs that request ``load`` of the machine's node-seconds on average."""

    def draw(rng: random.Random) -> MainJob:
        size = max(1, min(nodes // 2, round(2 ** rng.uniform(0, (nodes // 2).bit_length() - 1))))
        seconds = min(300.0, max(20.0, rng.lognormvariate(4.2, 0.7)))
        arrival = rng.uniform(0, 60 * minutes)
        limit_min = max(1, -(-int(seconds * rng.uniform(1.0, 4.0)) // 60))
        return MainJob(arrival, size, seconds, ("--exclusive", f"--time={limit_min}"))

    return drawn(load * nodes * 60 * minutes, draw, seed)


def replay(slurm: SlurmCluster, jobs: Sequence[MainJob], out: Path, minutes: float) -> MainRun:
    """Run the main workload. The results cover the time in which jobs arrive."""
    begin, records = main_jobs.replay(slurm, jobs, out, 60 * minutes)
    now = time.time()
    delays: list[float] = []
    used: dict[str, list[tuple[float, float]]] = {node: [] for node in slurm.nodes}
    for record in records:
        assert record.started is not None
        delays.append(record.started - record.submitted)
        for node in record.nodes:
            used[node].append((record.started, record.ended or now))
    times = {node: normal(pieces) for node, pieces in used.items()}
    return MainRun(delays, times, begin, begin + 60 * minutes)


def without_malletrain(root: Path, nodes: int, jobs: list[MainJob], minutes: float) -> MainRun:
    """Run without MalleTrain."""
    with _slurm(root, nodes) as slurm:
        return replay(slurm, jobs, root / "out", minutes)


def with_malletrain(
    root: Path, nodes: int, jobs: list[MainJob], minutes: float, shape: str, lease_nodes: int
) -> tuple[MainRun, Harvest]:
    """Run beside MalleTrain with three jobs that take all available nodes."""
    root.mkdir()
    config = CONFIG.replace("{shape}", shape).replace("{lease_nodes}", str(lease_nodes))
    with _slurm(root, nodes) as slurm:
        with running_daemon(root, slurm, config) as state:
            spans = submit_stubs(root, state, ("one", "two", "three"), nodes)
            slurm.until(lambda: (nodes_leased(state) or 0) == nodes, "MalleTrain holds the machine")
            slurm.until(lambda: _begun(spans) == nodes, "and has worked on all of it")
            before = submissions(slurm)
            run = replay(slurm, jobs, root / "out", minutes)
            with Connection.of(state) as client:
                status = client.status()
            result = {
                "preemptions": status.preemptions,
                "rescales": status.rescales,
                "submissions": submissions(slurm) - before - len(jobs),
            }
        return run, harvest_of(root, result)


def _slurm(root: Path, nodes: int) -> SlurmCluster:
    return SlurmCluster(
        root / "slurm",
        nodes,
        scheduler=SCHEDULER,
        grace=int(GRACE_S),
        kill_wait=int(KILL_WAIT_S),
        min_job_age=60,
        message_timeout=30,
    )


def _begun(spans: Path) -> int:
    """Return the number of nodes on which a stub has worked. Whether all of them work at one moment
    depends on how busy this machine is: 64 agents, their stubs and slurmds share its cores.
    """
    return len({path.name.split(".")[0] for path in spans.iterdir()})


def measure(
    nodes: int, minutes: float, load: float, seed: int, shapes: Sequence[str], lease_nodes: int
) -> Iterator[dict[str, Any]]:
    """Make one repeat: the same jobs without MalleTrain, and beside each shape of its leases."""
    jobs = workload(nodes, minutes, load, seed)
    root = Path(tempfile.mkdtemp(prefix="mt-noharm-", dir="/tmp"))
    root.chmod(0o755)
    try:
        (root / "a").mkdir()
        control = without_malletrain(root / "a", nodes, jobs, minutes)
        for shape in shapes:
            parameters = {"nodes": nodes, "minutes": minutes, "seed": seed, "shape": shape}
            result = with_malletrain(root / shape, nodes, jobs, minutes, shape, lease_nodes)
            yield {
                **parameters,
                "main_jobs": len(jobs),
                **compared(control, *result, nodes * minutes),
            }
    finally:
        shutil.rmtree(root, ignore_errors=True)


def compared(
    control: MainRun, beside: MainRun, harvest: Harvest, node_minutes: float
) -> dict[str, Any]:
    """Return the costs and the harvest of MalleTrain."""
    idle = sum(length(g) for g in gaps_of(beside, 0.0).values())
    sums = account(gaps_of(beside, LONG_GAP_S), harvest)
    offered, harvested = sums["offered"], sums["worked"]
    added = [b - a for a, b in zip(control.delays, beside.delays, strict=True)]
    prompt = [b - a for a, b in zip(control.delays, beside.delays, strict=True) if a < 2.0]
    node_hours = account(gaps_of(beside, 0.0), harvest)["worked"] / 3600
    return {
        **harvest.counts,
        "harvested_node_h": node_hours,
        "submissions_per_node_h": harvest.counts["submissions"] / node_hours,
        "delay_without": summary(control.delays),
        "delay_with": summary(beside.delays),
        "added": summary(added),
        "added_to_prompt_starts": summary(prompt) if prompt else None,
        "prompt_starts": len(prompt),
        "idle_node_s": idle,
        "idle_share": idle / (60 * node_minutes),
        "long_gap_node_s": offered,
        "harvested_node_s": harvested,
        "harvested_share": harvested / offered if offered else None,
        "account_node_s": sums,
    }


def main() -> int:
    """Print a table, or JSON with --json."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="how long main jobs arrive in each run"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--load",
        type=float,
        default=0.85,
        help="share of the node-seconds that the main jobs ask for",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shapes", nargs="+", choices=("single", "array", "block"), default=["single"]
    )
    parser.add_argument("--lease-nodes", type=int, default=8, help="in an array or block at most")
    parser.add_argument(
        "--slots", action="store_true", help="jobs beside leases of slots: benchmarks/noharm_slots"
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="whether main jobs wait longer than check says: benchmarks/noharm_bound",
    )
    parser.add_argument(
        "--cases", nargs="+", choices=noharm_bound.CASES, default=list(noharm_bound.CASES)
    )
    parser.add_argument("--cycles", type=int, default=6, help="windows of each kind (--slots)")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of each (--slots)")
    parser.add_argument("--wanted", type=int, default=8, help="slots wanted back (--slots)")
    parser.add_argument(
        "--confine", nargs="+", choices=noharm_slots.CONFINE, default=noharm_slots.CONFINE
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    if args.slots:
        figures = []
        for row in noharm_slots.rows(args.confine, args.cycles, args.window, args.wanted):
            figures.append(row)
            if not args.json:
                noharm_slots.show(row)
        if args.json:
            print(noharm_slots.as_json(figures))
        return 0
    if args.bound:
        config = CONFIG.replace("{shape}", "single").replace("{lease_nodes}", str(args.lease_nodes))
        figures = []
        trace = (args.nodes, args.minutes, args.load, args.seed)
        for row in noharm_bound.rows(args.cases, *trace, config):
            figures.append(row)
            if not args.json:
                noharm_bound.show(row)
        if args.json:
            print(json.dumps({"cpus": os.cpu_count(), "rows": figures}, indent=1))
        return 0
    rows = []
    for repeat in range(args.repeats):
        seed = args.seed + repeat
        workload = (args.nodes, args.minutes, args.load, seed, args.shapes, args.lease_nodes)
        for row in measure(*workload):
            rows.append(row)
            if args.json:  # commands that are discarded later have not cost these
                print(json.dumps(row), file=sys.stderr, flush=True)
            else:
                show(row)
    if args.json:
        print(
            json.dumps(
                {
                    "cpus": os.cpu_count(),
                    "grace_s": GRACE_S,
                    "kill_wait_s": KILL_WAIT_S,
                    "rows": rows,
                },
                indent=1,
            )
        )
    return 0


def show(row: dict[str, Any]) -> None:
    """Print one repeat as a table."""
    print(
        f"\n{row['nodes']} nodes, {row['minutes']:g} min, seed {row['seed']}, {row['shape']}: "
        f"{row['main_jobs']} main jobs, "
        f"{row['preemptions']} preemptions, {row['rescales']} rescales"
    )
    print(f"{'start delay, s':34} {'median':>8} {'p90':>8} {'max':>8} {'mean':>8}")
    names = {
        "delay_without": "without MalleTrain",
        "delay_with": "with MalleTrain",
        "added": "added, job by job",
        "added_to_prompt_starts": f"added where it was < 2 s ({row['prompt_starts']} jobs)",
    }
    for key, name in names.items():
        if s := row[key]:
            print(
                f"{name:34} {s['median_s']:8.2f} {s['p90_s']:8.2f} {s['max_s']:8.2f} "
                f"{s['mean_s']:8.2f}"
            )
    long_gaps = f"in gaps > {LONG_GAP_S:g} s {row['long_gap_node_s']:,.0f}"
    if row["long_gap_node_s"]:
        share = f"{row['harvested_share']:.1%} (target {TARGET:.0%})"
        long_gaps += f", of which harvested {row['harvested_node_s']:,.0f} = {share}"
    print(f"idle: {row['idle_share']:.1%} of the node-seconds; {long_gaps}")
    print(
        f"submissions: {row['submissions']}, {row['submissions_per_node_h']:.1f} for each of "
        f"{row['harvested_node_h']:.2f} harvested node-hours"
    )
    sums = row["account_node_s"]
    if not sums["offered"]:
        return
    lost = {
        "no lease yet": "before",
        "none between two": "between",
        "none at the end": "after",
        "lease starting": "starting",
        "waiting for work": "waiting",
        "rescaling": "rescaling",
        "leaving": "leaving",
    }
    print(
        "not harvested: "
        + ", ".join(f"{name} {sums[key] / sums['offered']:.1%}" for name, key in lost.items()),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
