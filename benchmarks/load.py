"""Measures one daemon under load: thousands of agents and jobs, waves of nodes, a long history, a
long run.

    python -m benchmarks.load [--part beats wave adopt start week] [--agents 10000] [--jobs 1000]
        [--seconds 60] [--repeats 3] [--old-jobs 100000] [--old-events 10000000] [--json FILE]

The daemon is the real one, in a process of its own. Its agents are simulated in other processes and
use the real protocol over CURVE sockets (:mod:`benchmarks.load_site`). Parts:

* ``beats``: every agent sends a heartbeat every 10 s and every job reports every second, and now
  and then a node is preempted with notice. Measured: the time from an event to the command that
  follows from it, including the solve (with a debounce time of 0); the waits of clients; CPU;
  memory.
* ``wave``: many nodes join and as many leave within a second.
* ``adopt``: the daemon is killed and started again: the time until it has adopted all agents and
  jobs. ``least``: the time until a bare server of libzmq in its place has greeted all agents.
* ``start``: the time until the daemon answers with a database of many old jobs and events.
* ``week``: jobs come and go and nodes are preempted for ``--seconds``, with all retention times
  short: whether memory, files and the database grow beyond what is retained.

The load of the machine is part of the result. Nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import end_in_order
from benchmarks.load_fleet import Seen
from benchmarks.load_floor import floor
from benchmarks.load_past import fill, submit_more
from benchmarks.load_site import Site, add_jobs, quantile_ms
from malletrain.client import Connection

COMMANDS = frozenset({"Assign", "Round", "Drain", "Abort", "Release"})
CAUSES = {"leaving": COMMANDS, "drained": frozenset({"Round"}), "succeeded": COMMANDS}
"""Message of an agent → the commands for the same job that follow from it."""
BUSY_S = 30.0
"""Time for which the main scheduler has a preempted node, seconds."""


def latencies(seen: list[Seen], since: float) -> dict[str, list[float]]:
    """Return cause → seconds from each event of that kind to the first command to an agent of its
    job.
    """
    delays: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    waiting: dict[str, list[Seen]] = {}
    for one in sorted((s for s in seen if s.at >= since and s.job), key=lambda s: s.at):
        if one.what in CAUSES:
            waiting.setdefault(one.job, []).append(one)
        elif one.what in COMMANDS:
            open_ones = waiting.get(one.job, [])
            for cause in [c for c in open_ones if one.what in CAUSES[c.what]]:
                delays[cause.what].append(one.at - cause.at)
                open_ones.remove(cause)
    return delays


class Pings:
    """A client that requests its jobs ten times per second, in a thread."""

    def __init__(self, state: Path) -> None:
        self.seconds: list[float] = []
        self._state, self._over = state, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with Connection.of(self._state) as client:
            while not self._over.wait(0.1):
                began = time.perf_counter()
                with contextlib.suppress(RuntimeError):
                    client.status()
                self.seconds.append(time.perf_counter() - began)

    def __enter__(self) -> Pings:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


def row(part: str, **measured: Any) -> dict[str, Any]:
    """Return one line of the result, with the present load of the machine."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in measured.items()}
    made = {"part": part, **rounded, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(made), file=sys.stderr, flush=True)
    return made


def running(site: Site) -> set[str]:
    """Return the jobs of which a round was formed."""
    return {one.job for one in list(site.seen) if one.what == "Round"}


def used(site: Site) -> int:
    """Return the number of nodes that jobs have."""
    return sum(map(len, site.at_work().values()))


@contextlib.contextmanager
def at_work(
    agents: int, jobs: int, spare: int, *, fleets: int = 2, heartbeat_s: float = 10.0, **more: Any
) -> Iterator[tuple[Site, list[str]]]:
    """Return a site with all agents connected and all jobs running; ``spare`` more nodes are
    busy.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        site = Site(
            Path(folder) / "site",
            agents + spare,
            agents,
            fleets=fleets,
            heartbeat_s=heartbeat_s,
            running=jobs,
            **more,
        )
        try:
            names = add_jobs(site.state, jobs, (1, max(2, agents // jobs)))
            site.start_daemon()
            site.until(lambda: sum(site.welcome) >= agents, f"{agents} agents are there")
            site.until(lambda: len(running(site)) >= jobs, f"{jobs} jobs run")
            site.until(lambda: used(site) >= agents, "they use all nodes", pause_s=2.0)
            site.until(site.is_quiet, "nothing more is said about rounds", pause_s=5.0)
            yield site, names
        finally:
            site.close()


def beats(site: Site, agents: int, jobs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run the normal load, with a preemption with notice every second."""
    chance = random.Random(seed)
    cpu, _ = site.usage()
    sent = [dict(one) for one in site.sent]
    began, most, gone = time.monotonic(), 0.0, 0
    back: list[tuple[float, str]] = []
    with Pings(site.state) as pings:
        while (now := time.monotonic()) < began + seconds:
            leased = [n for n, node in list(site.cluster.nodes.items()) if node.lease]
            node = chance.choice(leased)
            site.offer([node], idle=False)
            site.tell("leave", [node], 30.0)
            gone += 1
            back.append((now + BUSY_S, node))
            while back and back[0][0] <= now:
                site.offer([back.pop(0)[1]])
            most = max(most, site.usage()[1])
            time.sleep(1.0)
    took = time.monotonic() - began
    used, _ = site.usage()
    results = latencies(list(site.seen), began)
    every = [one for values in results.values() for one in values]
    figures = {
        kind: sum(b.get(kind, 0) - a.get(kind, 0) for a, b in zip(sent, site.sent, strict=True))
        for kind in ("beats", "reports")
    }
    site.offer([node for _, node in back])
    return row(
        "beats",
        agents=agents,
        jobs=jobs,
        seconds=took,
        beats_s=figures["beats"] / took,
        reports_s=figures["reports"] / took,
        preempted=gone,
        events=len(every),
        p50_ms=quantile_ms(every, 0.5),
        p99_ms=quantile_ms(every, 0.99),
        notice_p50_ms=quantile_ms(results["leaving"], 0.5),
        notice_p99_ms=quantile_ms(results["leaving"], 0.99),
        ask_p50_ms=quantile_ms(pings.seconds, 0.5),
        ask_p99_ms=quantile_ms(pings.seconds, 0.99),
        cores=(used - cpu) / took,
        rss_mb=most / 1e6,
    )


def wave(site: Site, count: int) -> dict[str, Any]:
    """Let nodes join, and others leave without notice, at one moment."""
    nodes = site.cluster.nodes
    joining = [name for name, node in nodes.items() if node.idle_since is None][:count]
    leaving = [name for name, node in nodes.items() if node.lease][:count]
    hit = {job for job, assigned in site.at_work().items() if not set(leaving).isdisjoint(assigned)}
    cpu, _ = site.usage()
    began = time.monotonic()
    with Pings(site.state) as pings:
        site.offer(leaving, idle=False)
        site.offer(joining)
        site.tell("vanish", leaving)

        def welcomed() -> set[str]:
            news = [s for s in list(site.seen) if s.at >= began and s.what == "welcome"]
            return {s.node for s in news} & set(joining)

        def mended() -> bool:
            informed = {s.job for s in list(site.seen) if s.at >= began and s.what == "Round"}
            return hit <= informed

        site.until(mended, "the jobs that lost nodes have new rounds")
        mended_s = time.monotonic() - began
        site.until(lambda: len(welcomed()) >= len(joining), "those that join are there")
    joined = sorted(s.at for s in list(site.seen) if s.at >= began and s.what == "welcome")
    return row(
        "wave",
        joined=len(joining),
        left=len(leaving),
        hit=len(hit),
        rounds_after_s=mended_s,
        first_welcome_s=joined[0] - began,
        all_welcome_s=joined[-1] - began,
        ask_max_ms=1000 * max(pings.seconds),
        cpu_s=site.usage()[0] - cpu,
        rss_mb=site.usage()[1] / 1e6,
    )


def adopt(site: Site) -> dict[str, Any]:
    """Kill the daemon, and start it again."""
    leased = sum(bool(node.lease) for node in site.cluster.nodes.values())
    jobs = set(site.at_work())
    site.end_daemon(signal.SIGKILL)
    site.until(lambda: sum(site.welcome) == 0, "the agents detect that it is gone")
    least_s, least_cpu_s = floor(site)
    before = time.monotonic()
    answers_s = site.start_daemon()
    site.until(lambda: sum(site.welcome) >= leased, "it has all agents again")
    agents_s = time.monotonic() - before

    def adopted() -> int:
        with sqlite3.connect(f"file:{site.state}/malletrain.db?mode=ro", uri=True) as base:
            last = "(SELECT max(seq) FROM events WHERE kind = 'daemon-started')"
            kinds = (
                "('job-adopted', 'round-formed')"  # jobs that were about to change form new rounds
            )
            query = f"SELECT count(DISTINCT job) FROM events WHERE kind IN {kinds} AND seq > {last}"
            return int(base.execute(query).fetchone()[0])

    site.until(lambda: adopted() >= len(jobs), "it has all jobs in hand")
    return row(
        "adopt",
        leases=leased,
        jobs=len(jobs),
        answers_s=answers_s,
        agents_s=agents_s,
        jobs_s=time.monotonic() - before,
        cpu_s=site.usage()[0],
        least_s=least_s,
        least_cpu_s=least_cpu_s,
        rss_mb=site.usage()[1] / 1e6,
    )


def start(jobs: int, events: int, repeats: int) -> list[dict[str, Any]]:
    """Start with a long history, until the daemon answers."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        site = Site(Path(folder) / "site", 4, 0, fleets=1)
        try:
            fill(site.state, jobs, events)
            size = sum(p.stat().st_size for p in site.state.glob("malletrain.db*")) / 1e9
            for _ in range(repeats):
                seconds = site.start_daemon()
                cpu, rss = site.usage()
                rows.append(
                    row(
                        "start",
                        jobs=jobs,
                        events=events,
                        database_gb=size,
                        seconds=seconds,
                        cpu_s=cpu,
                        rss_mb=rss / 1e6,
                    )
                )
                site.end_daemon()
        finally:
            site.close()
    return rows


def week(agents: int, jobs: int, seconds: float) -> list[dict[str, Any]]:
    """Let jobs and nodes come and go, with a retention of a tenth of the time."""
    keep = max(1.0, seconds / 10)
    config = f'[accounting]\nkeep = "{keep:g} s"\n'
    chance, rows = random.Random(1), []
    with at_work(agents, jobs, 0, heartbeat_s=1.0, config=config) as (site, _):
        began = shown = time.monotonic()
        ended = preempted = 0
        while (now := time.monotonic()) < began + seconds:
            at = site.at_work()
            for job in chance.sample(sorted(at), min(len(at), max(1, jobs // 20))):
                site.tell("finish", job)
                ended += 1
            submit_more(site, max(1, jobs // 20))
            leased = [n for n, node in list(site.cluster.nodes.items()) if node.lease]
            some = chance.sample(leased, min(len(leased), max(1, agents // 50)))
            site.offer(some, idle=False)
            site.tell("leave", some, 5.0)
            preempted += len(some)
            time.sleep(1.0)
            site.offer(some)
            site.seen.clear()
            if now - shown >= seconds / 10:
                shown = now
                rows.append(week_row(site, now - began, ended, preempted))
    return rows


def week_row(site: Site, seconds: float, ended: int, preempted: int) -> dict[str, Any]:
    """Return the current sizes."""
    assert site.daemon is not None
    cpu, rss = site.usage()
    with sqlite3.connect(f"file:{site.state}/malletrain.db?mode=ro", uri=True) as base:
        counts = {
            f"{table}_rows": base.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("jobs", "leases", "rescales", "observations", "events")
        }
    files = [p for p in site.state.rglob("*") if p.is_file() and "cluster" not in p.parts]
    return row(
        "week",
        seconds=seconds,
        ended=ended,
        preempted=preempted,
        rss_mb=rss / 1e6,
        cpu_s=cpu,
        descriptors=len(os.listdir(f"/proc/{site.daemon.pid}/fd")),
        files=len(files),
        database_mb=sum(p.stat().st_size for p in site.state.glob("malletrain.db*")) / 1e6,
        **counts,
    )


def main() -> int:
    """Print a table, and JSON with --json."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("beats", "wave", "adopt", "start", "week")
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts[:-1]))
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--wave", type=int, default=0, help="nodes; 0: a tenth of the agents")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--old-jobs", type=int, default=100_000)
    parser.add_argument("--old-events", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    count = args.wave or max(1, args.agents // 10)
    if {"beats", "wave", "adopt"} & set(args.part):
        with at_work(args.agents, args.jobs, count) as (site, _):
            for number in range(args.repeats):
                if "beats" in args.part:
                    rows.append(beats(site, args.agents, args.jobs, args.seconds, number))
                if "wave" in args.part:
                    rows.append(wave(site, count))
                if "adopt" in args.part:
                    rows.append(adopt(site))
    if "start" in args.part:
        rows += start(args.old_jobs, args.old_events, args.repeats)
    if "week" in args.part:
        rows += week(min(args.agents, 200), min(args.jobs, 20), args.seconds)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Return the median over the repeats of each part, and every row of the week."""
    lines = []
    for part in dict.fromkeys(one["part"] for one in rows):
        mine = [one for one in rows if one["part"] == part]
        if part == "week":
            lines += [_line("week", r) for r in mine]
            continue
        middle = {k: statistics.median(one[k] for one in mine) for k in mine[0] if k != "part"}
        lines.append(_line(f"{part} (median of {len(mine)})", middle))
    return "\n".join(lines)


def _line(name: str, values: dict[str, Any]) -> str:
    """Return one line of the table."""
    return f"{name}: " + "  ".join(f"{k} {v:g}" for k, v in values.items() if k != "part")


if __name__ == "__main__":
    raise SystemExit(main())
