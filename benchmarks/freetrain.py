"""Compares MalleTrain and FreeTrain on real processes: the same trace and the same jobs, one after
the other on the embedded cluster (the real half of the dissertation's Figure 3.10).

    python -m benchmarks.freetrain [--nodes 6] [--seconds 180] [--jobs 4] [--stated exact,wrong]
        [--trace FILE] [--speedup S] [--seed N] [--json FILE]

A model job is a process on each of its nodes whose step sleeps ``serial + parallel / workers``: it
scales by Amdahl's law although all virtual nodes share one machine. Half of the jobs scale almost
linearly, half level off soon. The trace decides which nodes are idle and when they are preempted,
with notice; without ``--trace`` it is a random one for demos from ``--seed``.

FreeTrain relies on what owners state about their jobs: the law itself (``exact``), that of the
other kind of job (``wrong``), or nothing (``none``: nodes to the power of 0.9 for all). MalleTrain
measures whatever is stated, and pays for its profiles. A row per run: samples of all jobs and of
the mean job relative to one node of its own (its speed-up), node-hours with a job, rescales,
seconds without samples, and samples relative to FreeTrain with exact curves. Real time:
``--seconds`` for each run, and half a minute to begin and end. Other load on the machine makes
rescales slower for both; it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scavenger.trace import files
from scavenger.trace.synthesis import demo_trace
from tests.integration.embedded import Site

KINDS = {"straight": (0.004, 0.08), "bent": (0.04, 0.04)}
"""Seconds of a step that do not shrink with workers, and seconds that do."""
BATCH = 24
STATED = ("exact", "wrong", "none")
SCRIPT = f"""
import os, sys, time, malletrain
serial, parallel = float(sys.argv[1]), float(sys.argv[2])
world = int(os.environ["WORLD_SIZE"])
while not os.path.exists("stop"):
    time.sleep(serial + parallel / world)
    malletrain.report({BATCH} / world)
"""
ALLOCATION = """
rescale_up = "1.5 s"
rescale_down = "1.5 s"
start = "3 s"
t_fwd = "30 s"
"""
"""Costs on this machine, and gaps that are some minutes shorter than a real machine's."""
PROFILING = """
when_worth = false
min_time = "2 s"
max_time = "10 s"
lease_patience = "5 s"
donor_quiet = "10 s"
"""


@dataclass(frozen=True)
class Played:
    """The results of one policy."""

    policy: str
    stated: str
    samples: float
    speed_up: float
    """Speed-up of the mean job, relative to one node of its own."""
    node_hours: float
    rescales: int
    paused_s: float
    """Seconds without samples because of starts and rescales, of all jobs."""
    preemptions: int
    load: float


def rate(kind: str, nodes: int) -> float:
    """Return samples/s of a job of this kind, by its law."""
    serial, parallel = KINDS[kind]
    return BATCH / (serial + parallel / nodes)


def stated_curve(kind: str, stated: str, most: int) -> dict[str, float] | None:
    """Return what the owner of a job states."""
    if stated == "none":
        return None
    other = next(name for name in KINDS if name != kind)
    law = kind if stated == "exact" else other
    return {str(k): rate(law, k) for k in range(1, most + 1)}


def play(policy: str, stated: str, o: argparse.Namespace, trace: Path) -> Played:
    """Run one policy from the beginning of the trace."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        site = Site(
            Path(folder) / "site",
            nodes=o.nodes,
            grace_s=15.0,
            config=f'policy = "{policy}"\n{ALLOCATION}',
            profiling=PROFILING,
            cluster={
                "trace": trace,
                "speedup": o.speedup,
                "duration_s": o.seconds,
                "start_s": o.start,
                "at_end": "hold",
                "hold": True,
                "seed": o.seed,
            },
        )
        try:
            site.start_daemon()
            return _run_jobs(site, policy, stated, o, load)
        finally:
            site.stop()


def _run_jobs(site: Site, policy: str, stated: str, o: argparse.Namespace, load: float) -> Played:
    script = site.script("train.py", SCRIPT)
    jobs: dict[str, str] = {}
    for number in range(o.jobs):
        kind = [*KINDS][number % len(KINDS)]
        words = (str(x) for x in KINDS[kind])
        curve = stated_curve(kind, stated, o.nodes) if policy == "freetrain" else None
        name = f"{kind}{number}"
        spec = {"curve": curve, "profile_key": name}
        job = site.submit(script, *words, nodes=(1, o.nodes), name=name, **spec)
        jobs[job] = kind
    site.cluster.go_on()
    time.sleep(o.seconds)
    details = {job: site.show(job) for job in jobs}
    with site.client() as client:
        status = client.status()
        used = client.usage()
    (site.work / "stop").touch()
    for job in jobs:
        with site.client() as client:
            client.cancel([job])
        site.until_state(job, "completed", "failed", "cancelled")
    alone = {job: o.seconds * rate(kind, 1) for job, kind in jobs.items()}
    return Played(
        policy,
        stated if policy == "freetrain" else "measured",
        sum(d.job.samples for d in details.values()),
        sum(d.job.samples / alone[job] for job, d in details.items()) / len(jobs),
        sum(row.leased_nh - row.unused_nh for row in used),
        status.rescales,
        sum(r.cost_s or 0.0 for d in details.values() for r in d.rescales),
        status.preemptions,
        load,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=180.0, help="of each run, real time")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument(
        "--stated", default="exact,wrong", help="what owners state, of exact, wrong and none"
    )
    parser.add_argument("--trace", type=Path, help="CSV of idle and busy events")
    parser.add_argument("--start", type=float, help="second of the trace to begin at")
    parser.add_argument(
        "--speedup", type=float, help="of the trace's times (default: 1; of a drawn one 30)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args()
    stated = o.stated.split(",")
    if unknown := [word for word in stated if word not in STATED]:
        parser.error(f"owners state {' or '.join(STATED)}, not {unknown[0]}")
    with tempfile.TemporaryDirectory() as folder:
        o.speedup = o.speedup or (1.0 if o.trace else 30.0)
        trace = o.trace or _write_random_trace(Path(folder) / "trace.csv", o)
        rows = [play("freetrain", word, o, trace) for word in stated]
        rows.append(play("malletrain", "none", o, trace))
    print(table(rows))
    if o.json:
        result: dict[str, Any] = {
            "options": _with_text_paths(vars(o)),
            "rows": [asdict(r) for r in rows],
        }
        o.json.write_text(json.dumps(result, indent=1) + "\n")


def _write_random_trace(path: Path, o: argparse.Namespace) -> Path:
    """Return a trace with changes, of as many seconds as are played."""
    files.write(demo_trace(o.nodes, o.seconds, o.speedup, o.seed), path)
    o.start = 0.0
    return path


def _with_text_paths(options: dict[str, Any]) -> dict[str, Any]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}


def table(rows: list[Played]) -> str:
    """Return the rows as text."""
    exact = next((r.samples for r in rows if r.stated == "exact"), rows[0].samples)
    lines = [
        "policy      curves      samples  over exact  speed-up  node-hours  rescales  paused  "
        "preemptions  load"
    ]
    lines += [
        f"{r.policy:10}  {r.stated:8}  {r.samples:9,.0f}  {r.samples / exact - 1:+10.1%}  "
        f"{r.speed_up:8.2f}  {r.node_hours:10.3f}  {r.rescales:8}  {r.paused_s:4.0f} s  "
        f"{r.preemptions:11}  {r.load:.1f}"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
