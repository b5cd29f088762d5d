"""The harvest of idle GPUs of shared hosts on a real Slurm: by slots, and by whole nodes.

    python -m benchmarks.slots --slurm [--minutes 5] [--gpu-hosts 4] [--gpu-load 0.6] [--held 1]
                               [--json]

A Slurm with ``cons_tres`` and hosts of four made-up GPUs runs on this machine. Main jobs of 1 to 4
GPUs of one host come and go, drawn at random: 20 s to 200 s each. With ``--held`` a further main
job of each host has so many of its GPUs all the time, as where no host is ever idle. The same jobs
are replayed beside leases of one GPU and beside leases of whole nodes, each time with malleable
jobs that take whatever there is. They are stubs (``benchmarks/stub_launcher.py``) that report and
compute nothing.

The idle GPUs of a host are taken as layers: layer *i* is idle while at least *i* of its GPUs are.
``offered`` are the GPU-seconds of the layers in gaps longer than a minute, ``harvested`` those of
them in which as many GPUs of the host had a stub at work. Target: 0.85 of them by slots.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import main_jobs
from benchmarks.main_jobs import MainJob, drawn
from benchmarks.noharm import CONFIG, GRACE_S, KILL_WAIT_S, LONG_GAP_S, TARGET
from benchmarks.noharm_account import spans_of, summary
from benchmarks.slurm_site import SCHEDULER, running_daemon, submit_stubs
from malletrain.client import Connection
from malletrain.demo.account import Intervals, both, length, normal, without
from scavenger.interface import host_of
from tests.slurm.cluster import SlurmCluster

GPUS = 4
"""GPUs of a host."""
MEMORY_MB = 450
"""Memory that is requested for each GPU."""
KIND = f"""
[[scheduler.slurm.slots]]
name = "gpu"
gpus = 1
cpus = 1
memory = "{MEMORY_MB} MiB"
[gaps]
"""
DEVICES = "".join(f"Name=gpu File=/dev/{name}\n" for name in ("null", "zero", "full", "random"))
SIZES = (1, 1, 1, 2, 2, 3, 4)
"""GPUs of main jobs, each as likely as the next."""
MIN_RUN_S, MAX_RUN_S = 20.0, 200.0


@dataclass(frozen=True)
class GpuRun:
    """A replay of the main jobs."""

    begin: float
    """Start of the account, epoch seconds."""
    end: float
    """End of the account, epoch seconds."""
    used: Mapping[str, Sequence[tuple[float, float, int]]]
    """Host → (start, end, GPUs) of each main job there."""
    delays: Sequence[float]
    """Seconds from the submission of each job to its first command."""


def workload(
    hosts: int, minutes: float, load: float, seed: int, held_gpus: int = 0
) -> list[MainJob]:
    """Return jobs that request ``load`` of the GPU-seconds on average, without those of the
    ``held_gpus`` GPUs of each host.
    """

    def draw(rng: random.Random) -> MainJob:
        run_s = min(MAX_RUN_S, max(MIN_RUN_S, rng.lognormvariate(4.2, 0.7)))
        arrival = rng.uniform(0, 60 * minutes)
        gpus = rng.choice([size for size in SIZES if size <= GPUS - held_gpus])
        return MainJob(arrival, 1, run_s, (*resources(gpus), "--time=5"), gpus)

    return drawn(load * hosts * (GPUS - held_gpus) * 60 * minutes, draw, seed)


def resources(gpus: int) -> tuple[str, ...]:
    """Return the options of sbatch for so many GPUs of one host."""
    return f"--gres=gpu:{gpus}", f"--cpus-per-task={gpus}", f"--mem={gpus * MEMORY_MB}"


def hold(slurm: SlurmCluster, gpus: int) -> None:
    """Start a main job on each host that has so many of its GPUs until Slurm ends; none for 0."""
    jobs = [
        slurm.submit("sleep 86400", f"--nodelist={host}", "--time=1440", *resources(gpus))
        for host in (slurm.nodes if gpus else ())
    ]
    slurm.until(lambda: all(slurm.jobs()[job][0] == "RUNNING" for job in jobs), "they run")


def busy_at_least(
    pieces: Iterable[tuple[float, float, int]], count: int
) -> tuple[tuple[float, float], ...]:
    """Return the times at which pieces of at least ``count`` GPUs in all run."""
    changes: dict[float, int] = {}
    for begin, end, gpus in pieces:
        changes[begin] = changes.get(begin, 0) + gpus
        changes[end] = changes.get(end, 0) - gpus
    spans, total, since = [], 0, 0.0
    for time_s in sorted(changes):
        before, total = total, total + changes[time_s]
        if before < count <= total:
            since = time_s
        elif total < count <= before:
            spans.append((since, time_s))
    return normal(spans)


def account(run: GpuRun, worked: Mapping[str, Intervals], per_lease: int) -> dict[str, float]:
    """Return GPU-seconds: ``idle``, ``offered`` and ``harvested`` (see the module).

    Args:
        run: the main jobs.
        worked: node or slot → times at which a stub worked on it.
        per_lease: GPUs of a lease.
    """
    whole = ((run.begin, run.end),)
    sums = dict.fromkeys(("idle", "offered", "harvested"), 0.0)
    for host, used in run.used.items():
        at_work = [
            (begin, end, per_lease)
            for node, spans in worked.items()
            if host_of(node) == host
            for begin, end in spans
        ]
        for layer in range(1, GPUS + 1):
            idle = without(whole, busy_at_least(used, GPUS - layer + 1))
            long = tuple(gap for gap in idle if gap[1] - gap[0] > LONG_GAP_S)
            sums["idle"] += length(idle)
            sums["offered"] += length(long)
            sums["harvested"] += length(both(long, busy_at_least(at_work, layer)))
    return sums


def replay(
    slurm: SlurmCluster, jobs: Sequence[MainJob], out: Path, minutes: float, held_gpus: int = 0
) -> GpuRun:
    """Run the main jobs beside those that have the ``held_gpus`` GPUs of each host. The account
    covers the time in which they arrive.
    """
    begin, records = main_jobs.replay(slurm, jobs, out, 60 * minutes)
    now, delays = time.time(), []
    used: dict[str, list[tuple[float, float, int]]] = {
        node: [(begin, now, held_gpus)] if held_gpus else [] for node in slurm.nodes
    }
    for job, record in zip(jobs, records, strict=True):
        assert record.started is not None
        delays.append(record.started - record.submitted)
        [host] = record.nodes
        used[host].append((record.started, record.ended or now, job.gpus))
    return GpuRun(begin, begin + 60 * minutes, used, delays)


def cluster(root: Path, hosts: int) -> SlurmCluster:
    """Return a Slurm whose hosts have four made-up GPUs."""
    return SlurmCluster(
        root,
        hosts,
        select="select/cons_tres",
        extra="GresTypes=gpu\nSelectTypeParameters=CR_Core_Memory\n",
        node=f"Gres=gpu:{GPUS}",
        cpus=GPUS,
        gres=DEVICES,
        scheduler=SCHEDULER,
        grace=int(GRACE_S),
        kill_wait=int(KILL_WAIT_S),
    )


def beside(
    root: Path, hosts: int, jobs: Sequence[MainJob], minutes: float, slots: bool, held_gpus: int = 0
) -> Any:
    """Return the figures of a replay beside MalleTrain.

    Args:
        root: an empty directory.
        hosts: number of hosts.
        jobs: the main jobs.
        minutes: time in which they arrive.
        slots: whether leases are slots; otherwise whole nodes.
        held_gpus: GPUs of each host that one main job has all the time.
    """
    root.mkdir()
    config = CONFIG.replace("{shape}", "single").replace("{lease_nodes}", "2")
    if slots:
        config = config.replace("[gaps]\n", KIND)
    units = hosts * (GPUS if slots else 1)
    with cluster(root / "slurm", hosts) as slurm:
        with running_daemon(root, slurm, config) as state:
            spans = submit_stubs(root, state, ("one", "two"), units)
            slurm.until(lambda: len(spans_of(spans)) == units, "stubs have worked everywhere")
            hold(slurm, held_gpus)
            run = replay(slurm, jobs, root / "out", minutes, held_gpus)
            with Connection.of(state) as client:
                status = client.status()
        worked = {name.replace("_", "/", 1): each for name, each in spans_of(spans).items()}
    sums = account(run, worked, 1 if slots else GPUS)
    return {
        **{f"{name}_gpu_s": round(value) for name, value in sums.items()},
        "harvested": round(sums["harvested"] / sums["offered"], 3) if sums["offered"] else None,
        "preemptions": status.preemptions,
        "rescales": status.rescales,
        "main_job_wait": summary(list(run.delays)),
    }


def measure(hosts: int, minutes: float, load: float, seed: int, held_gpus: int) -> dict[str, Any]:
    """Return the figures of ``--slurm``."""
    jobs = workload(hosts, minutes, load, seed, held_gpus)
    root = Path(tempfile.mkdtemp(prefix="mt-slots-", dir="/tmp"))
    root.chmod(0o755)
    try:
        return {
            "cpus": os.cpu_count(),
            "hosts": hosts,
            "gpus": hosts * GPUS,
            "minutes": minutes,
            "main_jobs": len(jobs),
            "held_gpus_of_each_host": held_gpus,
            "target": TARGET,
            "slots": beside(root / "slots", hosts, jobs, minutes, True, held_gpus),
            "whole_nodes": beside(root / "nodes", hosts, jobs, minutes, False, held_gpus),
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)
