"""What slots are worth: trials that share a host, and the harvest on a log of GPU jobs.

    python -m benchmarks.slots --trials [--steps 20] [--json]
    python -m benchmarks.slots --log philly_jobs.csv.gz [--json]
    python -m benchmarks.slots --slurm [--json]     (see benchmarks/slots_slurm.py)

``--trials``: a sweep of eight trials of one slot each on one host of the embedded cluster, once
with eight slots on the host and once with the whole host as the unit of leases, where the trials
run one after another. A trial takes ``--steps`` steps of a second, in which it sleeps. Measured is
the time from the start of the sweep to its end. Target: 0.2 of the time without slots.

``--log``: the GPUs that the jobs of a log leave idle, and what leases of one GPU and of whole hosts
harvest of them. The log (CSV, columns timestamp, duration, num_gpus, cluster) names no hosts. So
its jobs are placed on hosts of ``--per-host`` GPUs of their cluster, in the order of their arrival:
on the host with the fewest idle GPUs that suffice, larger jobs on idle hosts and the rest of them
as a smaller job. Each cluster has so many hosts that its jobs need ``--load`` of them. ``idle``
counts all idle GPU-hours, ``slots`` and ``whole_hosts`` the fraction of them in gaps longer than a
minute of single GPUs and of whole hosts. ``harvested``: the GPU-hours that the daemon's controller
uses of ``--hours`` in the middle, with 100 of 1,000 malleable jobs at a time (``malletrain
simulate``). With ``--cpu-log`` (SWF, such as KTH's) the machine also has the nodes of that log,
which are leased as a whole: ``by_kind`` is what the same controller uses of both kinds at once,
with every second job on single GPUs and the others on whole nodes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import end_in_order, slots_slurm
from malletrain.sim.engine import simulate
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_log
from malletrain.sim.policies import POLICIES
from malletrain.sim.settings import SimSettings
from malletrain.sim.slot_kinds import SlotKinds
from malletrain.sim.workloads import built_in, hpo
from scavenger.batch.slots import SlotKind
from scavenger.embedded.hosts import Division
from scavenger.trace.amounts import HEADER, TraceKind, divide, parse
from scavenger.trace.trace import Trace
from tests.integration.embedded import site
from tests.slurm.cluster import missing

TRIALS = 8
TARGET = 0.2
TRAIN = """
import sys, time, malletrain
for step in range(int(sys.argv[1])):
    time.sleep(1)
    malletrain.report(8)
malletrain.metric("loss", 0.5, step=1)
"""
SWEEP = """
[sweep]
metric = "loss"
trials = {trials}
at_once = {trials}
every = "500 ms"
[job]
script = "train.py"
args = ["{steps}"]
nodes = "1"
env = {{ MALLETRAIN_PRELOAD = "0" }}
profile = "off"
[space]
x = {{ low = 0.0, high = 1.0 }}
"""
SLOTS = """
[[scheduler.local.slots]]
name = "gpu"
gpus = 1
cpus = 1
memory = "1 GiB"
"""
GPU = SlotKind("gpu", {"gpu": 1, "cpus": 1, "memory_mb": 1024})
HOST = Division({"gpu": TRIALS, "cpus": TRIALS, "memory_mb": TRIALS * 1024}, (GPU,))


def sweep_s(folder: Path, steps: int, with_slots: bool) -> float:
    """Return the time that the sweep takes, seconds."""
    options: dict[str, Any] = {"division": HOST} if with_slots else {}
    config = SLOTS if with_slots else ""
    with site(folder, nodes=1, config=config, cluster=options) as made:
        made.script("train.py", TRAIN)
        file = made.script("s.toml", SWEEP.format(trials=TRIALS, steps=steps))
        words = ["sweep", "run", str(file), "--state-dir", str(made.state)]
        began = time.perf_counter()
        with (folder / "sweep.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "malletrain", *words], stdout=log, stderr=log, check=True
            )
        return time.perf_counter() - began


def trials(steps: int) -> dict[str, Any]:
    """Return the figures of ``--trials``."""
    with tempfile.TemporaryDirectory() as folder:
        slots = sweep_s(Path(folder) / "slots", steps, with_slots=True)
        whole = sweep_s(Path(folder) / "whole", steps, with_slots=False)
    return {
        "trials": TRIALS,
        "trial_s": steps,
        "slots_s": round(slots, 1),
        "whole_host_s": round(whole, 1),
        "ratio": round(slots / whole, 3),
        "target": TARGET,
    }


@dataclass
class LoggedJob:
    """A job of the log."""

    submit_s: float
    run_s: float
    gpus: int


class HostCluster:
    """Hosts of one cluster, on which jobs are placed in the order of their arrival. A job that does
    not fit waits, and up to ``LOOK_AHEAD`` jobs behind it can go before.
    """

    LOOK_AHEAD = 50

    def __init__(self, name: str, jobs: Sequence[LoggedJob], per_host: int, load: float) -> None:
        self.name = name
        self.jobs = jobs
        self.per_host = per_host
        span_s = max(1.0, jobs[-1].submit_s - jobs[0].submit_s)
        mean = sum(job.gpus * job.run_s for job in jobs) / span_s / load
        largest = max(job.gpus for job in jobs)
        self.idle = [per_host] * math.ceil(max(mean, largest) / per_host)
        """Idle GPUs of each host."""

    def changes(self, end_s: float) -> Iterator[tuple[float, int, int]]:
        """Yield (time, host, GPUs that become idle; negative: busy) until ``end_s``."""
        arriving, waiting = deque(self.jobs), deque[LoggedJob]()
        ends: list[tuple[float, int, list[tuple[int, int]]]] = []
        serial = itertools.count()
        while arriving or ends:
            due = [arriving[0].submit_s] if arriving else []
            now = min([*due, *(end for end, _, _ in ends[:1])])
            if now > end_s:
                return
            while ends and ends[0][0] <= now:
                for host, gpus in heapq.heappop(ends)[2]:
                    self.idle[host] += gpus
                    yield now, host, gpus
            while arriving and arriving[0].submit_s <= now:
                waiting.append(arriving.popleft())
            for job in list(itertools.islice(waiting, self.LOOK_AHEAD)):
                if (parts := self._place(job.gpus)) is None:
                    continue
                waiting.remove(job)
                heapq.heappush(ends, (now + job.run_s, next(serial), parts))
                for host, gpus in parts:
                    yield now, host, -gpus

    def _place(self, gpus: int) -> list[tuple[int, int]] | None:
        """Return (host, GPUs) of each part of a job, and take them; None if it does not fit."""
        idle, parts = [*self.idle], []
        while gpus > 0:
            part = min(gpus, self.per_host)
            fitting = [host for host, free in enumerate(idle) if free >= part]
            if not fitting:
                return None
            host = min(fitting, key=idle.__getitem__)
            idle[host] -= part
            parts.append((host, part))
            gpus -= part
        self.idle = idle
        return parts


def read_jobs(log: Path) -> dict[str, list[LoggedJob]]:
    """Return cluster → its jobs in the order of their arrival. Raises SystemExit if the log cannot
    be read.
    """
    jobs: dict[str, list[LoggedJob]] = {}
    try:
        with gzip.open(log, "rt", newline="") as file:
            for row in csv.DictReader(file):
                submit_s = datetime.fromisoformat(row["timestamp"]).timestamp()
                job = LoggedJob(submit_s, float(row["duration"]), int(row["num_gpus"]))
                if job.gpus > 0 and job.run_s > 0:
                    jobs.setdefault(row["cluster"], []).append(job)
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(
            f"The log {log} cannot be read ({error!r}); it needs the columns timestamp, duration, "
            "num_gpus and cluster, and gzip."
        ) from error
    for of_cluster in jobs.values():
        of_cluster.sort(key=lambda job: job.submit_s)
    return jobs


def amount_rows(log: Path, per_host: int, load: float) -> str:
    """Return a trace with amounts: the idle GPUs of the hosts on which the log's jobs are
    placed.
    """
    jobs = read_jobs(log)
    origin = min(of_cluster[0].submit_s for of_cluster in jobs.values()) - 1.0
    end = max(of_cluster[-1].submit_s for of_cluster in jobs.values())
    rows: list[tuple[float, str, int]] = []
    for name, of_cluster in jobs.items():
        cluster = HostCluster(name, of_cluster, per_host, load)
        rows += [(0.0, f"{name}-{host}", per_host) for host in range(len(cluster.idle))]
        rows += [(t - origin, f"{name}-{host}", n) for t, host, n in cluster.changes(end)]
    rows.sort(key=lambda row: row[0])
    lines = [f"{t:g},{host},{'idle' if n > 0 else 'busy'},{abs(n)}" for t, host, n in rows]
    return "\n".join([HEADER, *lines])


def gap_hours(trace: Trace, gpus: int) -> float:
    """Return the GPU-hours in gaps of more than a minute."""
    lengths = trace.gaps().length
    return float(lengths[lengths > 60.0].sum()) * gpus / 3600.0


def harvest(log: Path, per_host: int, load: float, hours: float) -> dict[str, Any]:
    """Return the figures of ``--log``."""
    amounts = parse(amount_rows(log, per_host, load), where=str(log))
    gpus, hosts = amounts.slots(kind="gpu"), amounts.whole_nodes()
    idle = float(gpus.gaps().length.sum()) / 3600.0
    figures: dict[str, Any] = {
        "hosts": len(hosts.names),
        "gpus": len(gpus.names),
        "days": round(amounts.duration_s / 86400.0, 1),
        "idle_gpu_hours": round(idle),
        "slots": round(gap_hours(gpus, 1) / idle, 3),
        "whole_hosts": round(gap_hours(hosts, per_host) / idle, 3),
    }
    start = amounts.duration_s / 2
    for name, trace, size in (("slots", gpus, 1), ("whole_hosts", hosts, per_host)):
        cut = trace.window(start, start + hours * 3600.0)
        jobs = hpo(built_in(64), 1000, 0)
        result = simulate(cut, jobs, SimSettings(POLICIES["malletrain"], max_running=100))
        used = result.equivalent_nodes * result.hours * result.harvested_fraction * size
        figures[f"harvested_gpu_hours_{name}"] = round(used)
    figures["simulated_hours"] = hours
    idle_there = gpus.window(start, start + hours * 3600.0).gaps().length.sum() / 3600.0
    figures["idle_gpu_hours_simulated"] = round(float(idle_there))
    return figures


def both_kinds(
    log: Path, cpu_log: Path, per_host: int, load: float, hours: float
) -> list[dict[str, Any]]:
    """Return the use of single GPUs of one log and whole nodes of another, in one simulation."""
    rows = amount_rows(log, per_host, load).splitlines()[1:]
    middle_s = float(rows[-1].partition(",")[0]) / 2
    gpu_hosts = frozenset(row.split(",")[1] for row in rows)
    whole = idle_nodes(read_log(cpu_log)).trace
    cpu_hosts = frozenset(f"cpu-{name}" for name in whole.names)
    rows += [
        f"{time:g},cpu-{whole.names[node]},{'idle' if idle else 'busy'},1"
        for time, node, idle in zip(
            whole.time.tolist(), whole.node.tolist(), whole.idle.tolist(), strict=True
        )
    ]
    rows.sort(key=lambda row: float(row.partition(",")[0]))
    amounts = parse("\n".join([HEADER, *rows]), where=str(log))
    kinds = [TraceKind("gpu", 1, gpu_hosts), TraceKind("cpu", None, cpu_hosts)]
    divided = divide(amounts, kinds, str(log))
    cut = divided.trace.window(middle_s, middle_s + hours * 3600.0)
    jobs = [
        replace(job, node_class=("gpu", "cpu")[number % 2])
        for number, job in enumerate(hpo(built_in(64), 1000, 0))
    ]
    settings = SimSettings(POLICIES["malletrain"], max_running=100)
    result = simulate(cut, jobs, settings, SlotKinds(divided.kind_of, divided.parts))
    return [asdict(kind) for kind in result.slots_by_kind]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trials", action="store_true", help="eight trials on one host")
    what.add_argument("--slurm", action="store_true", help="shared hosts of a real Slurm")
    what.add_argument("--log", type=Path, metavar="FILE", help="a log of GPU jobs with hosts")
    parser.add_argument("--steps", type=int, default=20, help="seconds that a trial takes")
    parser.add_argument("--per-host", type=int, default=8, help="GPUs of a host, for --log")
    parser.add_argument("--load", type=float, default=0.8, help="GPUs that jobs need, for --log")
    parser.add_argument("--hours", type=float, default=12.0, help="simulated hours of --log")
    parser.add_argument("--cpu-log", type=Path, metavar="FILE", help="whole nodes too, for --log")
    parser.add_argument("--minutes", type=float, default=5.0, help="of main jobs, for --slurm")
    parser.add_argument("--gpu-hosts", type=int, default=4, help="hosts of four GPUs, for --slurm")
    parser.add_argument("--gpu-load", type=float, default=0.6, help="of main jobs, for --slurm")
    parser.add_argument("--held", type=int, default=0, help="GPUs of each host that are never idle")
    parser.add_argument("--seed", type=int, default=1, help="of the main jobs of --slurm")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.slurm:
        if reason := missing():
            raise SystemExit(reason)
        end_in_order()
        if not 0 <= args.held < slots_slurm.GPUS:
            parser.error(f"--held {args.held}: give 0 to {slots_slurm.GPUS - 1}.")
        figures = slots_slurm.measure(
            args.gpu_hosts, args.minutes, args.gpu_load, args.seed, args.held
        )
    elif args.trials:
        figures = trials(args.steps)
    else:
        figures = harvest(args.log, args.per_host, args.load, args.hours)
        if args.cpu_log:
            figures["by_kind"] = both_kinds(
                args.log, args.cpu_log, args.per_host, args.load, args.hours
            )
    if args.json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
