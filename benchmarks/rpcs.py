"""Counts the requests of MalleTrain to a real slurmctld: remote procedure calls (RPCs) per second,
by kind, as ``sdiag`` reports them.

    python -m benchmarks.rpcs [--nodes 64] [--minutes 4] [--load 0.85] [--set KEY=VALUE] [--json]

A Slurm runs on this machine (needs its packages, see tests/slurm/install.sh), with a daemon whose
configuration for Slurm is the default except for ``--set``, which adds to [scheduler.slurm]. Three
phases: *idle* (no job of MalleTrain), *filling* (three jobs that take all available nodes, until
all are leased), *churning* (the main workload of benchmarks.noharm preempts leases and gives nodes
back). Malleable jobs are stubs, as there. The RPCs of MalleTrain's commands are counted, not those
of the nodes' own daemons (slurmd), of the main jobs' ``sbatch``, and of the measurement. Each phase
is the difference of two outputs of sdiag.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import end_in_order
from benchmarks.noharm import GRACE_S, KILL_WAIT_S, replay, workload
from benchmarks.slurm_site import SCHEDULER, nodes_leased, running_daemon, submit_stubs
from malletrain.client import Connection
from tests.slurm.cluster import SlurmCluster, missing

TARGET = 2.0
"""Maximum RPCs per second and user: the refill rate of rl_enable in Slurm 23.02 and later."""
IDLE_S = 60.0
OF_NODES = frozenset(
    {
        "MESSAGE_EPILOG_COMPLETE",
        "MESSAGE_NODE_REGISTRATION_STATUS",
        "REQUEST_COMPLETE_BATCH_SCRIPT",
        "REQUEST_COMPLETE_PROLOG",
        "REQUEST_STEP_COMPLETE",
    }
)
"""Kinds of RPCs that slurmd sends for any job."""
MEASURING = "REQUEST_STATS_INFO"
SUBMISSION = "REQUEST_SUBMIT_BATCH_JOB"
_RPC = re.compile(r"^\s+(\w+)\s*\(\s*\d+\) count:(\d+)", re.MULTILINE)
CONFIG = """
[daemon]
state_dir = "{state}"
metrics_listen = ""
heartbeat = "2 s"
agent_timeout = "30 s"
[scheduler]
kind = "slurm"
[scheduler.slurm]
partition = "preemptable"
time_min = "1 min"
spare = "5 s"
{more}
[gaps]
use_planned = true
[jobs]
stop_grace = "1 s"
drain_timeout = "1 s"
[allocation]
rescale_up = "1 s"
rescale_down = "1 s"
start = "1 s"
[profiling]
enabled = false
"""


def read_sdiag(text: str) -> dict[str, int]:
    """Return RPC → its count in the output of sdiag."""
    _, _, rest = text.partition("statistics by message type")
    by_type, _, _ = rest.partition("statistics by user")
    return {name: int(count) for name, count in _RPC.findall(by_type)}


def between(
    before: Mapping[str, int], after: Mapping[str, int], main_jobs: int = 0
) -> dict[str, int]:
    """Return MalleTrain's RPCs between two outputs; ``main_jobs``: jobs that others submitted
    meanwhile.
    """
    result = {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if name not in OF_NODES and name != MEASURING
    }
    result[SUBMISSION] = result.get(SUBMISSION, 0) - main_jobs
    return {name: count for name, count in sorted(result.items()) if count}


class Phase:
    """One phase of the measurement."""

    def __init__(self, slurm: SlurmCluster, name: str) -> None:
        self.slurm = slurm
        self.name = name
        self.before = read_sdiag(slurm.run("sdiag"))
        self.began = time.monotonic()

    def end(self, main_jobs: int = 0) -> dict[str, Any]:
        """Return its row."""
        seconds = time.monotonic() - self.began
        result = between(self.before, read_sdiag(self.slurm.run("sdiag")), main_jobs)
        return {
            "phase": self.name,
            "seconds": seconds,
            "rpcs": sum(result.values()),
            "rpcs_per_s": sum(result.values()) / seconds,
            "by_kind": result,
        }


def measure(nodes: int, minutes: float, load: float, seed: int, more: str) -> list[dict[str, Any]]:
    """Run the phases one after the other."""
    root = Path(tempfile.mkdtemp(prefix="mt-rpcs-", dir="/tmp"))
    root.chmod(0o755)
    cluster = SlurmCluster(
        root / "slurm",
        nodes,
        scheduler=SCHEDULER,
        grace=int(GRACE_S),
        kill_wait=int(KILL_WAIT_S),
        min_job_age=60,
        message_timeout=30,
    )
    try:
        with cluster as slurm:
            return _phases(root, slurm, minutes, workload(nodes, minutes, load, seed), more)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _phases(
    root: Path, slurm: SlurmCluster, minutes: float, jobs: list[Any], more: str
) -> list[dict[str, Any]]:
    rows = []
    with running_daemon(root, slurm, CONFIG.replace("{more}", more)) as state:
        phase = Phase(slurm, "idle")
        time.sleep(IDLE_S)
        rows.append(phase.end())
        submit_stubs(root, state, ("one", "two", "three"), len(slurm.nodes))
        phase = Phase(slurm, "filling")
        slurm.until(lambda: nodes_leased(state) == len(slurm.nodes), "MalleTrain holds the machine")
        rows.append(phase.end())
        phase = Phase(slurm, "churning")
        leases = _leases(state)
        replay(slurm, jobs, root / "out", minutes)
        rows.append({**phase.end(len(jobs)), "leases": _leases(state) - leases})
    return rows


def _leases(state: Path) -> int:
    """Return the number of leases requested so far."""
    with Connection.of(state) as client:
        requests, since = 0, 0
        while events := client.events(since=since, limit=1000):
            requests += sum(event.kind == "lease-requested" for event in events)
            since = events[-1].seq
        return requests


def main() -> int:
    """Print a table, or JSON with --json."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=4.0, help="length of the last phase")
    parser.add_argument("--load", type=float, default=0.85, help="as of benchmarks.noharm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of [scheduler.slurm]"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    more = "\n".join(args.set)
    rows = measure(args.nodes, args.minutes, args.load, args.seed, more)
    if args.json:
        result = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "nodes": args.nodes}
        print(json.dumps({**result, "target_per_s": TARGET, "phases": rows}, indent=1))
        return 0
    print(f"{args.nodes} nodes; target {TARGET:g} RPCs/s")
    print(f"{'phase':10} {'s':>6} {'RPCs':>6} {'RPCs/s':>7}  by kind")
    for row in rows:
        kinds = ", ".join(f"{name} {count}" for name, count in row["by_kind"].items())
        line = f"{row['seconds']:6.0f} {row['rpcs']:6d} {row['rpcs_per_s']:7.2f}"
        print(f"{row['phase']:10} {line}  {kinds}")
    print(f"{rows[-1]['leases']} leases were requested while churning.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
