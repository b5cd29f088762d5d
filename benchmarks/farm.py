"""Measures how fast a farm hands out tasks, and the time of the same farm with other tools.

    python -m benchmarks.farm --dispatch [--tasks 100000] [--nodes 4] [--equal] [--json]
    python -m benchmarks.farm --peers [--tasks 1000] [--nodes 24] [--scale 1] [--grace 10]
        [--seed 1] [--contenders array hyperqueue malletrain] [--json]

``--dispatch``: tasks of ``true`` on an embedded cluster, whose nodes have as many slots as this
machine has cores. Tasks/s are those between the first and the last result. Meanwhile another client
requests ``status`` ten times per second: the median, the 99th percentile and the maximum of its
waits. On a real site the nodes are not on the daemon's host: here the daemon and its clients get
the processor before the nodes and their tasks (sched(7), autogroups; root only), except with
``--equal``. Also reported: how long the daemon ran, and waited for a processor (schedstat).

``--peers``: tasks of 0.5 to 20 s (times ``--scale``) on a real Slurm with main jobs, by Slurm's own
job array, by HyperQueue and by ``malletrain map`` (benchmarks/farm_peers.py). Needs Slurm's
packages (tests/slurm/install.sh), and for HyperQueue the package index; its environment is stored
below ~/.cache/malletrain/benchmarks. Reported for each: the time until the last task is done,
node-seconds of interrupted tasks, tasks that were started again or done twice, node-seconds that
were idle while tasks waited, the wait of main jobs, and submissions to Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from benchmarks import end_in_order, farm_peers
from benchmarks.farm_contenders import CONTENDERS
from malletrain.client import operations
from tests.integration import farms
from tests.integration.embedded import Site, site
from tests.slurm.cluster import missing

TARGET_PER_S, TARGET_STATUS_MS = 200.0, 100.0
ROWS_AT_ONCE = 5000
HIGHEST_PRIORITY = -20
STATUS_EVERY_S, POLL_S = 0.1, 0.25


class StatusClient(threading.Thread):
    """Requests ``status`` until it is stopped."""

    def __init__(self, made: Site) -> None:
        super().__init__(daemon=True)
        self._site, self._over = made, threading.Event()
        self.waits_ms: list[float] = []

    def run(self) -> None:
        with self._site.client() as client:
            while not self._over.wait(STATUS_EVERY_S):
                began = time.perf_counter()
                client.status()
                self.waits_ms.append(1e3 * (time.perf_counter() - began))

    def stop(self) -> None:
        self._over.set()
        self.join()


@contextlib.contextmanager
def preferred() -> Iterator[bool]:
    """Let the processes of this session run before those of others, such as the nodes and their
    tasks. Yields whether that is possible.
    """
    setting = Path("/proc/self/autogroup")
    try:
        setting.write_text(f"{HIGHEST_PRIORITY}")
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        setting.write_text("0")


def processor_s(pid: int) -> tuple[float, float]:
    """Return the processor time of all threads of a process, and the time for which they were
    ready and waited for a processor, seconds (Documentation/scheduler/sched-stats of Linux).
    """
    ran, waited = 0, 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            thread_ran, thread_waited, _ = map(int, file.read_text().split())
            ran, waited = ran + thread_ran, waited + thread_waited
    return ran / 1e9, waited / 1e9


def dispatch(tasks: int, nodes: int, equal: bool) -> dict[str, Any]:
    """Run ``tasks`` tasks of ``true``. Return the figures. ``equal``: the daemon does not get the
    processor before the tasks.
    """
    with (
        contextlib.nullcontext(False) if equal else preferred() as daemon_first,
        tempfile.TemporaryDirectory() as root,
        site(Path(root), nodes=nodes) as made,
    ):
        assert made.daemon is not None
        daemon = psutil.Process(made.daemon.pid)
        began = time.perf_counter()
        job = farms.empty(made, "", tasks, f"1:{nodes}", words=("true", "{x}"))
        for first in range(0, tasks, ROWS_AT_ONCE):
            rows = [[str(k)] for k in range(first, min(tasks, first + ROWS_AT_ONCE))]
            farms.add(made, job, first, rows)
        added_s = time.perf_counter() - began
        with made.client() as client:
            done = operations.tasks(job, limit=0)
            while not (first_count := client.do(done).counts["done"]):
                time.sleep(0.01)
            first_at, (ran_s, waited_s) = time.perf_counter(), processor_s(daemon.pid)
            status = StatusClient(made)
            status.start()
            while client.do(done).counts["done"] < tasks:
                time.sleep(POLL_S)
            seconds = time.perf_counter() - first_at
            ran_s, waited_s = (
                now - before
                for now, before in zip(processor_s(daemon.pid), (ran_s, waited_s), strict=True)
            )
            status.stop()
            view = made.until_state(job, "completed", "failed")
        return {
            "tasks": tasks,
            "daemon_first": daemon_first,
            "slots": nodes * len(os.sched_getaffinity(0)),
            "state": view.state,
            "done": int(view.samples),
            "added_s": added_s,
            "seconds": seconds,
            "per_s": (tasks - first_count) / seconds,
            "daemon_cpu_ms_per_task": 1e3 * ran_s / tasks,
            "daemon_waits_for_cpu": waited_s / seconds,
            "daemon_rss_mb": daemon.memory_info().rss / 1e6,
            "status_median_ms": float(np.percentile(status.waits_ms, 50)),
            "status_p99_ms": float(np.percentile(status.waits_ms, 99)),
            "status_max_ms": max(status.waits_ms, default=0.0),
        }


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['done']:,} of {figures['tasks']:,} tasks done on {figures['slots']} slots")
    rows = (
        ("tasks/s", f"{figures['per_s']:.0f}", f"at least {TARGET_PER_S:.0f}"),
        ("status, 99th percentile", f"{figures['status_p99_ms']:.0f} ms",
         f"at most {TARGET_STATUS_MS:.0f} ms"),
        ("status, median", f"{figures['status_median_ms']:.1f} ms", ""),
        ("status, maximum", f"{figures['status_max_ms']:.0f} ms", ""),
        ("adding the tasks", f"{figures['added_s']:.1f} s", ""),
        ("daemon's processor time", f"{figures['daemon_cpu_ms_per_task']:.2f} ms a task", ""),
        ("daemon waits for processors", f"{figures['daemon_waits_for_cpu']:.1%} of the time", ""),
        ("daemon's memory", f"{figures['daemon_rss_mb']:.0f} MB", ""),
    )  # fmt: skip
    for name, value, target in rows:
        print(f"{name:<26}{value:>18}  {target}".rstrip())


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--dispatch", action="store_true", help="tasks/s, and waits of clients")
    part.add_argument("--peers", action="store_true", help="beside a job array and HyperQueue")
    parser.add_argument(
        "--equal", action="store_true", help="daemon and tasks share the cores equally (--dispatch)"
    )
    parser.add_argument("--tasks", type=int, help="100,000 of --dispatch, 1,000 of --peers")
    parser.add_argument("--nodes", type=int, help="4 of --dispatch, 24 of --peers")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the tasks' lengths")
    parser.add_argument("--grace", type=int, default=10, help="of a preemption, seconds")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and main jobs")
    parser.add_argument(
        "--limit", type=float, default=3000.0, help="of each contender, seconds (default: 3000)"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS)
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.dispatch:
        figures = dispatch(options.tasks or 100_000, options.nodes or 4, options.equal)
        print(json.dumps(figures)) if options.json else show(figures)
        return 0
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    figures = farm_peers.compare(
        options.contenders,
        tasks=options.tasks or 1000,
        nodes=options.nodes or 24,
        scale=options.scale,
        grace_s=options.grace,
        seed=options.seed,
        limit_s=options.limit,
        console=Console(stderr=True),
    )
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        farm_peers.show(figures, Console(width=None if sys.stdout.isatty() else 160))
    return 0


if __name__ == "__main__":
    sys.exit(main())
