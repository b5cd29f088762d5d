"""A slow link of a job on several nodes: ``python -m benchmarks.slow_nodes --slow-link MBIT``.

Uses hosts of their own (network namespaces that a bridge connects, with a real Slurm; needs root),
as in :mod:`tests.hosts`. The kernel limits the link of one of the job's nodes to MBIT Mbit/s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.bed import Bed, missing
from tests.hosts.site import HostsSite

SCRIPT = """
import os, time, torch, torch.distributed as dist, malletrain
torch.set_num_threads(1)
dist.init_process_group("gloo")
gradients, stop = torch.ones(1 << 16), torch.zeros(1)
while not stop.item():
    time.sleep(0.04)
    dist.all_reduce(gradients.fill_(1.0))
    stop.fill_(float(os.path.exists("stop")))
    dist.all_reduce(stop)
    malletrain.report(1, busy_s=0.04)
dist.destroy_process_group()
"""
"""Each step takes 40 ms, as if an accelerator worked, and exchanges 256 KiB of gradients."""


@dataclass(frozen=True)
class SlowedLink:
    """The results of one run."""

    policy: str
    before: float
    """Steps/s."""
    slowed: float
    last: float
    """Steps/s over the last third of the time."""
    named_s: float | None
    swapped_s: float | None
    others_named: int
    """Nodes that were reported without being slow."""
    measured_mbit: float | None
    usual_mbit: float | None
    nodes_last: int
    load: float


def run(policy: str, o: argparse.Namespace) -> SlowedLink:
    """Run one job with a slow link. Raises RuntimeError if such hosts are not possible here."""
    if reason := missing():
        raise RuntimeError(reason)
    load = os.getloadavg()[0]
    root = Path(tempfile.mkdtemp(prefix="mt-links-", dir="/var/tmp"))
    root.chmod(0o755)
    bed = Bed(root, o.nodes)
    try:
        bed.start()
        keys = (
            f'slow_nodes = "{policy}"\nslow_after = "{o.after:g} s"\nlink_every = "{o.every:g} s"'
        )
        site = HostsSite(bed, root / "shared", fabric=keys).start()
        return _slowed(site, policy, o, load)
    finally:
        bed.stop()
        shutil.rmtree(root, ignore_errors=True)


def _slowed(site: HostsSite, policy: str, o: argparse.Namespace, load: float) -> SlowedLink:
    job = site.submit("train.py", SCRIPT, f"1:{o.size}")
    before = 0.0
    while not before:  # only the number of samples changed in that time
        site.until(
            lambda: len(site.job(job)["nodes"]) == o.size and site.job(job)["rate"] > 0, "it trains"
        )
        rounds = len(site.events("round-formed", "job-rescaled"))
        time.sleep(3 * o.every)
        before = _rate(site, job, 8.0)
        before *= rounds == len(site.events("round-formed", "job-rescaled"))
    victim = site.job(job)["nodes"][-1]
    began, at = time.time(), time.monotonic()
    site.bed.throttle(next(n for n in site.bed.nodes if n.name == victim), o.slow_link)
    slowed = _rate(site, job, 8.0)
    time.sleep(max(0.0, o.seconds * 2 / 3 - (time.monotonic() - at)))
    last = _rate(site, job, o.seconds / 3)
    nodes_last = len(site.job(job)["nodes"])
    named = {e["node"]: e for e in site.events("node-slow") if e["time"] >= began}
    formed = [
        e["time"]
        for e in site.events("round-formed")
        if e["time"] >= began and victim not in e["data"]["members"]
    ]
    (site.work / "stop").touch()
    site.until(lambda: site.job(job)["state"] == "completed", "the job completes")
    mine = named.get(victim)
    return SlowedLink(
        policy,
        before,
        slowed,
        last,
        mine["time"] - began if mine else None,
        formed[0] - began if formed and policy == "swap" else None,
        len(named.keys() - {victim}),
        mine["data"].get("mbit") if mine else None,
        mine["data"].get("usual_mbit") if mine else None,
        nodes_last,
        load,
    )


def _rate(site: HostsSite, job: str, seconds: float) -> float:
    """Return steps/s: each rank reports one sample per step."""
    size = max(1, len(site.job(job)["nodes"]))
    first, at = site.job(job)["samples"], time.monotonic()
    time.sleep(seconds)
    return float(site.job(job)["samples"] - first) / (time.monotonic() - at) / size
