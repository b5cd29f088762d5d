"""How fast a farm hands out tasks, and how long clients wait meanwhile.

    python -m benchmarks.farm --dispatch [--tasks 100000] [--nodes 4] [--json]

``--dispatch``: tasks of ``true`` on an embedded cluster, whose nodes have as many slots as this
machine has cores. Tasks/s are those between the first and the last result. Beside it another client
asks for ``status`` ten times a second: the median, the 99th percentile and the maximum of its
waits. On a real site the nodes are not on the daemon's host: here the daemon and its clients get
the processor before the nodes and their tasks (sched(7), autogroups; root only).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from malletrain.client import operations
from tests.integration import farms
from tests.integration.embedded import Site, site

TARGET_PER_S, TARGET_STATUS_MS = 200.0, 100.0
ROWS_AT_ONCE = 5000
HIGHEST_PRIORITY = -20
STATUS_EVERY_S, POLL_S = 0.1, 0.25


class StatusClient(threading.Thread):
    """Asks for ``status`` until it is stopped."""

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


def dispatch(tasks: int, nodes: int) -> dict[str, Any]:
    """Run that many tasks of ``true``. Returns the figures."""
    with (
        preferred() as daemon_first,
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
            first_at, cpu = time.perf_counter(), sum(daemon.cpu_times()[:2])
            status = StatusClient(made)
            status.start()
            while client.do(done).counts["done"] < tasks:
                time.sleep(POLL_S)
            seconds = time.perf_counter() - first_at
            cpu_s = sum(daemon.cpu_times()[:2]) - cpu
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
            "daemon_cpu_ms_per_task": 1e3 * cpu_s / tasks,
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
        ("daemon's memory", f"{figures['daemon_rss_mb']:.0f} MB", ""),
    )  # fmt: skip
    for name, value, target in rows:
        print(f"{name:<26}{value:>18}  {target}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dispatch", action="store_true", help="tasks/s, and waits of clients")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.dispatch:
        parser.error("name a part: --dispatch")
    figures = dispatch(options.tasks, options.nodes)
    print(json.dumps(figures)) if options.json else show(figures)


if __name__ == "__main__":
    main()
