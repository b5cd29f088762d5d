"""What the page costs: how fast its data come, and how much of the daemon many viewers take.

    python -m benchmarks.web [--jobs 1000] [--nodes 5000] [--viewers 100] [--seconds 30] [--json]

A real daemon (embedded cluster of two nodes, one job that runs) has so many jobs in its store,
most of them over. For the nodes a stand-in of a daemon answers with views of that many nodes and
jobs, a tenth of which change with each look. Both are looked at by ``malletrain web`` with
so many viewers, each of which follows the stream. Measured are the CPU time of the real daemon with
no page, and with that many viewers; and from the stand-in's page the time to the last byte of what
the pages load, 100 requests each, while all viewers follow from a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import end_in_order
from malletrain.store.records import JobRow
from malletrain.store.store import Store
from tests.integration.embedded import site
from tests.integration.web_page import CHATTY, COLD, TOKEN, WebPage, page
from tests.malletrain.cli.fake_daemon import FakeDaemon
from tests.malletrain.web.looks import job, look, node

REQUESTS = 100
PAUSE_S = 0.05
"""Pause between two requests, so that they are spread over several polls of the daemon, seconds."""
PATHS = ("machine", "jobs", "nodes", "timeline")


VIEWERS = """
import asyncio, sys
from urllib.parse import urlsplit

async def read(url, token):
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = ["GET /api/v1/stream HTTP/1.1", f"Host: {at.netloc}", f"Authorization: Bearer {token}"]
    writer.write("\\r\\n".join([*head, "", ""]).encode())
    assert b" 200 " in await reader.readline()
    while await reader.read(1 << 20):
        pass
    raise SystemExit("the stream ended")

async def main(url, token, viewers):
    await asyncio.gather(*(read(url, token) for _ in range(int(viewers))))

asyncio.run(main(*sys.argv[1:]))
"""
"""Run viewers as other machines would: they share no interpreter with the measurement."""


@contextlib.contextmanager
def followed(web: WebPage, viewers: int) -> Iterator[None]:
    """Run ``count`` viewers of the stream during the block."""
    argv = [sys.executable, "-c", VIEWERS, web.base, TOKEN, str(viewers)]
    readers = subprocess.Popen(argv)
    try:
        yield
        assert readers.poll() is None, "the viewers are gone"
    finally:
        readers.kill()
        readers.wait()


def seconds_for(web: WebPage, path: str) -> float:
    """Return the time until the last byte of a compressed answer, as a browser requests it."""
    request = urllib.request.Request(
        f"{web.base}/api/v1/{path}",
        headers={"Authorization": f"Bearer {TOKEN}", "Accept-Encoding": "gzip"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began


def cpu_share(pid: int, seconds: float) -> float:
    """Return the processor time of a process per second."""
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds


def daemon_cost(jobs: int, viewers: int, seconds: float, root: Path) -> dict[str, float]:
    """Return the share of a core that the real daemon uses."""
    with site(root, nodes=2, config=COLD) as made:
        script, stop_job = made.script("chatty.py", CHATTY), made.work / "stop"
        template = made.submit(script, str(stop_job), "loss", profile=False)
        made.until_samples(template, 100)
        with Store.open(f"sqlite:///{made.state / 'malletrain.db'}") as store:
            row = store.get_job(template)
            assert row is not None
            with store.transaction():
                for k in range(jobs):
                    store.add_job(
                        JobRow(
                            store.new_job_id(), f"old-{k}", row.owner, row.spec, "completed",
                            submitted=1.0, started=2.0, ended=3.0, samples=1e6,
                        )
                    )  # fmt: skip
        assert made.daemon is not None
        alone = cpu_share(made.daemon.pid, seconds)
        with page(made.state) as web, followed(web, viewers):
            time.sleep(5.0)
            watched = cpu_share(made.daemon.pid, seconds)
        stop_job.touch()
        made.until_state(template, "completed")
    return {"alone": alone, "watched": watched}


def page_times(jobs: int, nodes: int, viewers: int, root: Path) -> dict[str, dict[str, float]]:
    """Return the milliseconds until the last byte of what a page loads."""
    all_jobs = [job(k, "completed", ended=3.0, nodes=()) for k in range(jobs)]
    all_nodes = [node(f"n{k}", "job" if k % 3 else "idle") for k in range(nodes)]
    looks = 0

    def changing(_: Any) -> list[Any]:
        nonlocal looks
        looks += 1
        for k in range(looks % 10, nodes, 10):
            state = "free" if all_nodes[k].state == "job" else "job"
            all_nodes[k] = node(f"n{k}", state)
        return all_nodes

    state_dir = root / "state"
    state_dir.mkdir(parents=True)
    fake = FakeDaemon(
        state_dir,
        {
            "status": lambda _: look(time.time()).status,
            "jobs": lambda _: all_jobs,
            "nodes": changing,
            "events": lambda _: [],
            "usage": lambda _: [],
        },
    )
    results: dict[str, dict[str, float]] = {}
    try:
        with page(state_dir) as web, followed(web, viewers):
            time.sleep(5.0)
            for path in PATHS:
                times = []
                for _ in range(REQUESTS):
                    times.append(1000 * seconds_for(web, path))
                    time.sleep(PAUSE_S)
                cuts = statistics.quantiles(times, n=20)
                results[path] = {"p50": cuts[9], "p95": cuts[18]}
    finally:
        fake.stop()
    return results


def main() -> int:
    """Print a table, or JSON with --json."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        times = page_times(args.jobs, args.nodes, args.viewers, Path(folder) / "times")
        cost = daemon_cost(args.jobs, args.viewers, args.seconds, Path(folder) / "cost")
    if args.json:
        print(json.dumps({"load": load, "times_ms": times, "daemon_cores": cost}, indent=1))
        return 0
    print(f"{args.jobs} jobs, {args.nodes} nodes, {args.viewers} viewers; load {load:.1f}")
    for path, row in times.items():
        print(f"GET {path:10} p50 {row['p50']:7.1f} ms   p95 {row['p95']:7.1f} ms")
    print(
        f"the daemon without the page {100 * cost['alone']:.1f} % of a core, "
        f"with {args.viewers} viewers {100 * cost['watched']:.1f} %"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
