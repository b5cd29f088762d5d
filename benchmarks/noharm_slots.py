"""What a lease of a slot does to a job beside it on the same host, on a real Slurm.

    python -m benchmarks.noharm --slots [--cycles 6] [--window 3] [--wanted 8]
                                [--confine affinity own none] [--json]

A Slurm with ``cons_tres`` and two made-up GPUs on one host of two processors runs on this machine.
A main job with one GPU and one processor repeats a kernel and writes down how long each repetition
takes: ``memory`` reads and writes arrays that are larger than the caches, ``network`` sends blocks
through a TCP connection of the loopback to a thread of its own. Beside it a malleable job has the
other slot and, in turn, waits, trains a small model with torch, waits, and reads and writes large
arrays itself. The slow-down is that of the median repetition of a window in which the lease works,
relative to the two waiting windows around it; reported are median and maximum over the windows. A
control, in which it does nothing either, shows what the noise of the machine makes of it.

``--confine``: what confines the jobs to processors. ``affinity``: Slurm (``task/affinity``), so
that main job and lease have a processor of their own. ``own``: Slurm does not (``task/none``), and
the lease restricts itself. ``none``: nothing does (``[nodes] bound_cpus = false, niceness = 0``,
normal I/O priority).

``wanted``: a lease holds each slot, and a main job is submitted that needs one. Reported is its
wait from submission to its first command, beside that on the same Slurm before MalleTrain runs.

Both processors are also those of the daemon, slurmctld and slurmd, in all windows alike. The
network is the loopback, which is memory and processor time; a network card is not measured.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.noharm_account import summary
from tests.slurm.cluster import SlurmCluster
from tests.slurm.site import SlurmTestSite, slurm_site

TARGET_SLOWDOWN = 0.02
TARGET_WAIT_S = 3.0
CONFINE = ("affinity", "own", "none")
WORK = ("nothing", "train", "memory")
"""Work of the lease in the windows that are compared with waiting ones. ``nothing`` is the control,
which shows the noise of the machine.
"""
KERNELS = ("memory", "network")
SLOT = ("--gres=gpu:1", "--cpus-per-task=1", "--mem=900", "--ntasks=1", "--time=60")
KIND = """
[[scheduler.slurm.slots]]
name = "gpu"
gpus = 1
cpus = 1
memory = "900 MiB"
"""
UNBOUNDED = """
[nodes]
bound_cpus = false
niceness = 0
io_priority = "normal"
"""
KERNEL = """
import os, socket, sys, threading, time
import numpy as np
kind, path = sys.argv[1:]
if kind == "memory":
    a, b, c = (np.ones(4_000_000) for _ in range(3))
    def repeat():
        np.multiply(c, 3.0, out=a)
        np.add(a, b, out=a)
else:
    server = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(server.getsockname())
    into, _ = server.accept()
    block = bytes(1 << 20)
    def drain():
        while into.recv(1 << 20):
            pass
    threading.Thread(target=drain, daemon=True).start()
    def repeat():
        for _ in range(16):
            out.sendall(block)
with open(path, "w", buffering=1) as file:
    while True:
        began = time.time()
        repeat()
        file.write(f"{began!r} {time.time() - began!r}\\n")
"""
"""The main job: each line of its file is the start and the duration of one repetition."""
LEASE_JOB = """
import os, time
import malletrain, numpy as np, torch
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(256, 256)
a, b, c = (np.ones(4_000_000) for _ in range(3))
def train():
    for _ in range(10):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
def memory():
    np.multiply(c, 3.0, out=a)
    np.add(a, b, out=a)
while not os.path.exists("stop"):
    work = open("work").read()
    if work in ("train", "memory"):
        {"train": train, "memory": memory}[work]()
    else:
        time.sleep(0.05)
    malletrain.report(8)
"""


class Window(NamedTuple):
    """A time in which the lease did one kind of work."""

    work: str
    """The work; empty: it waited."""
    begin: float
    """Start, epoch seconds."""
    end: float
    """End, epoch seconds."""


def slow_downs(
    windows: Sequence[Window], repetitions: Sequence[tuple[float, float]]
) -> dict[str, list[float]]:
    """Return work → the slow-down of the main job in each window with it: the median repetition,
    relative to the mean of the medians of the waiting windows before and after it, less 1.

    Args:
        windows: windows in order of time; every second one is a waiting one, the first and the last
            among them.
        repetitions: (start, duration) of each repetition, seconds. One counts for a window if it
            lies in it.
    """
    medians = []
    for window in windows:
        inside = [d for at, d in repetitions if window.begin <= at and at + d <= window.end]
        medians.append(statistics.median(inside) if inside else None)
    ratios: dict[str, list[float]] = {}
    for index, window in enumerate(windows):
        if not window.work:
            continue
        before, here, after = medians[index - 1 : index + 2]
        if before is not None and here is not None and after is not None:
            ratios.setdefault(window.work, []).append(2 * here / (before + after) - 1)
    return ratios


def read_repetitions(path: Path) -> list[tuple[float, float]]:
    """Return (start, duration) of the kernel's repetitions, without an incomplete last line."""
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [(float(at), float(duration)) for at, duration in map(str.split, lines)]


def cluster(root: Path, confine: str) -> SlurmCluster:
    """Return a Slurm with one host of two processors and two made-up GPUs."""
    plugin = "TaskPlugin=task/affinity\n" if confine == "affinity" else ""
    return SlurmCluster(
        root,
        1,
        select="select/cons_tres",
        extra=f"GresTypes=gpu\nSelectTypeParameters=CR_Core_Memory\n{plugin}",
        node="Gres=gpu:2",
        cpus=2,
        gres="Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n",
    )


def start_wait_s(slurm: SlurmCluster, out: Path) -> float:
    """Return the time from the submission of a main job to its first command, seconds."""
    begin = time.time()
    job = slurm.submit(f"date +%s.%N >{out}.part; mv {out}.part {out}; sleep 600", *SLOT)
    slurm.until(out.exists, "the main job starts")
    wait_s = float(out.read_text()) - begin
    slurm.run("scancel", job)
    slurm.until(lambda: job not in running(slurm), "the main job has ended")
    out.unlink()
    return wait_s


def running(slurm: SlurmCluster) -> set[str]:
    """Return the ids of jobs that have not ended."""
    return set(slurm.run("squeue", "-h", "-o", "%A").split())


def beside(
    slurm: SlurmCluster, site: SlurmTestSite, kernel: str, cycles: int, window_s: float
) -> dict[str, list[float]]:
    """Return work → slow-downs of a main job that repeats ``kernel`` beside a lease."""
    work, path = site.work / "work", site.root / kernel
    _write(work, "")
    script = site.script("kernel.py", KERNEL)
    main = slurm.submit(f"exec {sys.executable} {script} {kernel} {path}", *SLOT)
    slurm.until(lambda: path.exists() and len(read_repetitions(path)) > 20, "the main job runs")
    job = site.submit(site.script("lease.py", LEASE_JOB), nodes=(1, 1))
    site.until_samples(job, site.job(job).samples + 100)
    windows = []
    for text in ("", *(each for name in WORK * cycles for each in (name, ""))):
        _write(work, text)
        time.sleep(0.5)  # until the current step has ended
        begin = time.time()
        time.sleep(window_s)
        windows.append(Window(text, begin, time.time()))
    (site.work / "stop").touch()
    site.until_state(job, "completed")
    (site.work / "stop").unlink()
    slurm.run("scancel", main)
    slurm.until(lambda: main not in running(slurm), "the main job has ended")
    return slow_downs(windows, read_repetitions(path))


def wanted_back(slurm: SlurmCluster, site: SlurmTestSite, repeats: int) -> list[float]:
    """Return the waits of main jobs for a slot that has a lease, seconds."""
    _write(site.work / "work", "train")
    job = site.submit(site.script("lease.py", LEASE_JOB), nodes=(1, 2))
    waits = []
    for number in range(repeats):
        site.until(lambda: len(site.job(job).nodes) == 2, "leases have both slots")
        site.until_samples(job, site.job(job).samples + 100)
        waits.append(start_wait_s(slurm, site.root / f"wanted-{number}"))
    (site.work / "stop").touch()
    site.until_state(job, "completed")
    return waits


def measure(confine: str, cycles: int, window_s: float, repeats: int) -> dict[str, Any]:
    """Return the figures of one way of confinement."""
    root = Path(tempfile.mkdtemp(prefix="mt-noharm-", dir="/tmp"))
    root.chmod(0o755)
    try:
        with cluster(root / "slurm", confine) as slurm:
            alone = [start_wait_s(slurm, root / f"alone-{n}") for n in range(repeats)]
            lines = KIND + (UNBOUNDED if confine == "none" else "")
            with slurm_site(root / "site", slurm, lines=lines) as site:
                slowed = {k: beside(slurm, site, k, cycles, window_s) for k in KERNELS}
                waits = wanted_back(slurm, site, repeats)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        "confine": confine,
        "slow_down": [
            {
                "kernel": kernel,
                "lease": work,
                "windows": len(values),
                "median": statistics.median(values),
                "max": max(values),
            }
            for kernel, by_work in slowed.items()
            for work, values in by_work.items()
        ],
        "wait": summary(waits) if waits else None,
        "wait_without": summary(alone) if alone else None,
    }


def rows(
    confine: Sequence[str], cycles: int, window_s: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way of confinement."""
    for each in confine:
        yield measure(each, cycles, window_s, repeats)


def show(row: dict[str, Any]) -> None:
    """Print the figures of one way of confinement as a table."""
    print(f"\nprocessors confined by: {row['confine']}")
    print(f"{'main job':10} {'lease':10} {'windows':>8} {'median':>8} {'max':>8}")
    for line in row["slow_down"]:
        print(
            f"{line['kernel']:10} {line['lease']:10} {line['windows']:8} {line['median']:8.1%} "
            f"{line['max']:8.1%}"
        )
    print(f"target: {TARGET_SLOWDOWN:.0%} in the median")
    for name, key in (("wait for a slot wanted back", "wait"), ("without leases", "wait_without")):
        if each := row[key]:
            print(
                f"{name:28} median {each['median_s']:.2f} s, p90 {each['p90_s']:.2f} s, max "
                f"{each['max_s']:.2f} s"
            )
    print(f"target: {TARGET_WAIT_S:g} s in the median", flush=True)


def as_json(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as JSON."""
    return json.dumps(
        {
            "cpus": os.cpu_count(),
            "target_slow_down": TARGET_SLOWDOWN,
            "target_wait_s": TARGET_WAIT_S,
            "rows": list(figures),
        },
        indent=1,
    )


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)
