"""A slow node in a job on several nodes: its cost, the time until it is detected and replaced, and
the benefit of that; on the embedded cluster, with real processes.

    python -m benchmarks.slow_nodes [--inject work|neighbours] [--times 2.5] [--nodes 5] [--size 4]
        [--seconds 60] [--after 12] [--json FILE]

A job of up to ``--size`` nodes makes steps that end in an all-reduce over gloo. After a while one
of its nodes becomes slow:

* ``work``: its part of a step takes ``--times`` as long. The part is a sleep, as if an accelerator
  worked, and the script reports its duration (``busy_s``);
* ``neighbours``: several busy processes share its processor, as another job there would. The part
  is 8 ms of the processor's own work, and the script reports nothing: the kernel's counts of the
  thread are compared.

One run only reports the node (``slow_nodes = "name"``), one replaces it (``swap``). A row for each:
steps/s before, with the slow node, and over the last third of the time, which is after the
replacement; seconds until it was detected, and until the job trained without it. ``--after`` is
``[nodes] slow_after``, by default a minute.

    python -m benchmarks.slow_nodes --slow-link 10 [--every 5] [--nodes 5] [--size 4]

The nodes of the embedded cluster have one network. So this runs on hosts of their own
(:mod:`benchmarks.slow_links`; needs root), where the link of one node has that many Mbit/s.
``--every`` is ``[nodes] link_every``, by default half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import slow_links
from tests.integration.embedded import Site, site

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, malletrain
torch.set_num_threads(1)
dist.init_process_group("gloo")
node, how, times = os.environ["MALLETRAIN_NODE"], sys.argv[1], float(sys.argv[2])
open("pid-" + node, "w").write(str(os.getpid()))
stop = torch.zeros(1)
while not stop.item():
    began = time.monotonic()
    if how == "work":
        time.sleep(0.04 * (times if os.path.exists("slow-" + node) else 1.0))
    else:
        own = time.thread_time()
        while time.thread_time() - own < 0.008:
            pass
        time.sleep(0.02)
    busy = time.monotonic() - began
    stop.fill_(float(os.path.exists("stop")))
    dist.all_reduce(stop)
    malletrain.report(1, busy_s=busy if how == "work" else None)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Slowed:
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
    load: float


def run(policy: str, o: argparse.Namespace) -> Slowed:
    """Run one job with a slow node."""
    load = os.getloadavg()[0]
    section = f'\n[nodes]\nslow_nodes = "{policy}"\nslow_after = "{o.after:g} s"\n'
    with (
        tempfile.TemporaryDirectory() as folder,
        site(Path(folder) / "site", nodes=o.nodes, config=section) as made,
    ):
        script = made.script("train.py", SCRIPT)
        job = made.submit(script, o.inject, str(o.times), nodes=(1, o.size), profile=False)
        made.until(
            lambda: len(made.job(job).nodes) == o.size and made.job(job).rate > 0, "it trains"
        )
        time.sleep(o.after + 5.0)
        before = _rate(made, job, 8.0)
        victim = made.job(job).nodes[-1]
        with _slow(made, victim, o):
            began, at = time.time(), time.monotonic()
            slowed = _rate(made, job, min(8.0, o.after / 2))
            time.sleep(max(0.0, o.seconds * 2 / 3 - (time.monotonic() - at)))
            last = _rate(made, job, o.seconds / 3)
            named = {e.node: e.time - began for e in made.events("node-slow")}
            rescales = [r for r in made.show(job).rescales if r.began > began and r.ended]
        (made.work / "stop").touch()
        made.until_state(job, "completed", "failed")
    return Slowed(
        *(policy, before, slowed, last, named.get(victim)),
        (rescales[0].ended or 0.0) - began if rescales and policy == "swap" else None,
        len(named.keys() - {victim}),
        load,
    )


def _rate(made: Site, job: str, seconds: float) -> float:
    """Return steps/s: each rank reports one sample per step."""
    size = max(1, len(made.job(job).nodes))
    first, at = made.job(job).samples, time.monotonic()
    time.sleep(seconds)
    return (made.job(job).samples - first) / (time.monotonic() - at) / size


@contextmanager
def _slow(made: Site, node: str, o: argparse.Namespace) -> Iterator[None]:
    """Make the node slow during the block."""
    if o.inject == "work":
        (made.work / f"slow-{node}").touch()
        yield
        return
    worker = int((made.work / f"pid-{node}").read_text())
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(worker, {cpu})
    busy = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile 1: pass"]
    neighbours = [subprocess.Popen(busy) for _ in range(round(o.times))]
    try:
        yield
    finally:
        for one in neighbours:
            one.send_signal(signal.SIGKILL)
            one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inject", choices=["work", "neighbours"], default="work")
    parser.add_argument("--times", type=float, default=2.5)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="with the slow node")
    parser.add_argument("--after", type=float, default=12.0, help="slow_after, seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--slow-link", type=float, metavar="MBIT", help="of one node's cable")
    parser.add_argument("--every", type=float, default=5.0, help="link_every, seconds")
    policies = ["name", "swap"]
    parser.add_argument("--policy", nargs="+", choices=policies, default=policies)
    o = parser.parse_args()
    once = slow_links.run if o.slow_link else run
    rows = [once(policy, o) for policy in o.policy]
    print("slow_nodes  steps/s before  slowed   last  named after  without it after  others  load")
    for r in rows:
        named, gone = ("never" if s is None else f"{s:.0f} s" for s in (r.named_s, r.swapped_s))
        print(
            f"{r.policy:10}  {r.before:14.1f}  {r.slowed:6.1f}  {r.last:5.1f}  {named:>11}  "
            f"{gone:>16}  {r.others_named:6}  {r.load:.1f}"
        )
    if o.json:
        o.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
