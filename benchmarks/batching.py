"""What a new plan after each change of the batch is worth.

    python -m benchmarks.batching [--contenders 64 frozen planned] [--samples 10000] [--json]
    python -m benchmarks.batching --predict
    python -m benchmarks.batching --trace week1.csv.gz --node-list nodes.txt [--seeds 5]
        [--accuracy FOLDER]

On six virtual nodes of an embedded cluster, a training whose global batch grows from 64 to 512
samples in steps (benchmarks.train_batching: a step sleeps as long as a law says) and another one
with the same throughput on each node. Contenders:

* ``64``: the batch stays at 64, on the nodes that the plan gives it there;
* ``frozen``: the batch grows, and both keep the nodes of the plan that was best for 64;
* ``planned``: the batch grows; its curve is profiled once, at 64, and nodes follow the plans.

Node-seconds are counted from the first sample of the training to its end, per 1,000 samples: its
own, and those of all six nodes per 1,000 samples of both trainings. ``new plan``: from the first
step with a larger batch to other nodes, seconds. ``profiles``: how many there were.

``--predict`` prints, for each batch, the throughput that the law of step times (jpa.fit)
predicts from what is measured at smaller batches, beside the truth; nothing is started.

``--trace``: benchmarks.batching_simulated, batches that follow the gradient noise beside fixed ones
in the simulator. With ``--accuracy FOLDER``: benchmarks.batching_accuracy, one such job that really
learns Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from allocator import NodeInfo, RescaleCost, ScalingCurve
from benchmarks import batching_accuracy, train_batching
from benchmarks.batching_simulated import simulated
from benchmarks.needs import existing
from benchmarks.train_batching import STEADY_RATE, step_s
from jpa import MeasuredCurve
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.pools import Pool
from malletrain.core.settings import PlanningSettings
from malletrain.protocol.views import JobView
from tests.integration.embedded import Site, site

NODES, MOST = 6, 5
"""Nodes of the site, and the maximum of the growing training; the other one keeps one."""
BASE = 64
EPOCHS = {64: 5, 128: 3, 256: 4, 512: 5}
"""Number of epochs with each batch."""
COST = RescaleCost(1.5, 1.5, 3.0)
CONFIG = 'rescale_up = "1.5 s"\nrescale_down = "1.5 s"\nstart = "3 s"\n'
PROFILING = 'when_worth = false\nlease_patience = "20 s"'
POLL_S = 0.25


@dataclass(frozen=True)
class Moment:
    """State of both trainings at one time."""

    time: float
    """Seconds since the epoch."""
    nodes: int
    """Nodes of the growing training."""
    samples: float
    """Samples of the growing training so far."""
    other_samples: float
    """Samples of the other training so far."""


@dataclass(frozen=True)
class Outcome:
    """One contender."""

    contender: str
    seconds: float
    nodes: dict[int, int]
    """Batch → nodes at its end."""
    own_node_s: float
    """Node-seconds of the growing training per 1,000 of its samples."""
    all_node_s: float
    """Node-seconds of all nodes per 1,000 samples of both."""
    new_plan_s: dict[int, float | None]
    """Batch → seconds until it had other nodes; None if it kept them."""
    profiles: int
    load: float


def rate(nodes: int, batch: float) -> float:
    """Return the true throughput, samples/s."""
    return batch / step_s(nodes, batch)


def best_nodes(batch: int) -> int:
    """Return the nodes that a plan from the true curves gives to the growing training."""
    curves = {
        "growing": ScalingCurve.of((k, rate(k, batch)) for k in range(1, MOST + 1)),
        "steady": ScalingCurve.of((k, STEADY_RATE * k) for k in range(1, NODES)),
    }
    bidders = [
        Candidate(name, 1, int(curve.largest), (), curve=curve, must_run=True)
        for name, curve in curves.items()
    ]
    nodes = {f"n{k}": NodeInfo(Pool("default")) for k in range(NODES)}
    return len(make_plan(bidders, nodes, PlanningSettings(cost=COST)).nodes["growing"])


# --- account ---


def node_seconds(moments: Sequence[Moment]) -> float:
    """Return the node-seconds of the growing training."""
    return sum(a.nodes * (b.time - a.time) for a, b in pairwise(moments))


def reactions(
    moments: Sequence[Moment], changes: Sequence[tuple[float, int]]
) -> dict[int, float | None]:
    """Return, for each batch, the seconds until the training had other nodes; None if it kept them
    until the next batch.

    Args:
        moments: in order of time.
        changes: (time, new batch).
    """
    ends = [*(at for at, _ in changes), float("inf")][1:]
    seconds: dict[int, float | None] = {}
    for (began, batch), end in zip(changes, ends, strict=True):
        before = [m.nodes for m in moments if m.time <= began][-1:]
        # A training that has ended, or is between two sets of nodes, has none.
        running = (m for m in moments if began < m.time < end and m.nodes)
        later = (m.time for m in running if [m.nodes] != before)
        first = next(later, None)
        seconds[batch] = None if first is None else first - began
    return seconds


def nodes_by_batch(
    moments: Sequence[Moment], changes: Sequence[tuple[float, int]]
) -> dict[int, int]:
    """Return the nodes at the end of each batch. ``changes``: (time, new batch)."""
    sizes = [BASE, *(batch for _, batch in changes)]
    ends = [*(at for at, _ in changes), float("inf")]
    return {
        size: [m.nodes for m in moments if m.time < end and m.nodes][-1]
        for size, end in zip(sizes, ends, strict=True)
    }


# --- runs ---


def run(contender: str, samples: int) -> Outcome:
    """Run one contender; ``samples``: of an epoch."""
    load = os.getloadavg()[0]
    epochs = EPOCHS if contender != "64" else {BASE: 3}
    sizes = ",".join(str(size) for size, count in epochs.items() for _ in range(count))
    fixed = best_nodes(BASE)
    limits = (1, MOST) if contender == "planned" else (fixed, fixed)
    rest = (1, NODES - 1) if contender == "planned" else (NODES - fixed, NODES - fixed)
    with (
        tempfile.TemporaryDirectory() as directory,
        site(Path(directory), nodes=NODES, config=CONFIG, profiling=PROFILING) as made,
    ):
        text = Path(train_batching.__file__).read_text()
        script = made.script("train_batching.py", text)
        curve = {str(k): STEADY_RATE * k for k in range(1, NODES)}
        steady = made.submit(
            script, "steady", nodes=rest, profile=False, curve=curve, name="steady"
        )
        growing = made.submit(
            script,
            *("ramp", sizes, str(samples)),
            nodes=limits,
            profile=contender == "planned",
            name="growing",
        )
        made.until(
            lambda: made.job(growing).samples > 0 and made.job(steady).samples > 0, "both train"
        )
        moments = _watch(made, growing, steady)
        (made.work / "stop").touch()
        made.until_state(steady, "completed", "failed")
        profiles = len(made.events("profile-finished", growing))
        changes = _changes(made.work / "changes.txt")
    first, last = moments[0], moments[-1]
    own = last.samples - first.samples
    both = own + last.other_samples - first.other_samples
    seconds = last.time - first.time
    return Outcome(
        contender,
        seconds,
        nodes_by_batch(moments, changes),
        1e3 * node_seconds(moments) / own,
        1e3 * NODES * seconds / both,
        reactions(moments, changes),
        profiles,
        load,
    )


def _watch(made: Site, growing: str, steady: str) -> list[Moment]:
    """Return what both had until the growing training has ended."""
    moments = []
    while True:
        job, other = made.job(growing), made.job(steady)
        moments.append(Moment(time.time(), len(job.nodes), job.samples, other.samples))
        if _has_ended(job):
            if job.state != "completed":
                raise SystemExit(f"The training has {job.state}: {job.reason}")
            return moments
        time.sleep(POLL_S)


def _has_ended(job: JobView) -> bool:
    return job.state in ("completed", "failed", "cancelled")


def _changes(path: Path) -> list[tuple[float, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), int(size)) for at, size in map(str.split, lines)]


# --- predictions ---


def predictions() -> list[dict[str, float]]:
    """Return the errors of the law at each batch: before anything is measured there, and after the
    nodes that the job has there.
    """
    sizes = range(1, MOST + 1)
    curve = MeasuredCurve().of_one_law()
    for k in sizes:
        curve = curve.with_measurement(k, rate(k, BASE), 0.01 * rate(k, BASE), 0.0)
    rows = []
    for batch in list(EPOCHS)[1:]:
        curve, _ = curve.with_phase(f"batch x{batch / BASE:.3g}")
        before = _worst(curve, batch)
        here = best_nodes(batch // 2)
        curve = curve.with_measurement(here, rate(here, batch), 0.01 * rate(here, batch), 0.0)
        rows.append({"batch": batch, "unmeasured": before, "one size": _worst(curve, batch)})
    return rows


def _worst(curve: MeasuredCurve, batch: int) -> float:
    return max(abs(curve.estimate(k)[0] / rate(k, batch) - 1) for k in range(1, MOST + 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    contenders = ("64", "frozen", "planned")
    parser.add_argument("--contenders", nargs="+", choices=contenders, default=contenders)
    parser.add_argument("--samples", type=int, default=10_000, help="of an epoch")
    parser.add_argument("--predict", action="store_true", help="errors of the law, without a run")
    parser.add_argument("--trace", type=Path, help="trace of idle nodes, for the simulator")
    parser.add_argument("--node-list", type=Path, help="all nodes of the machine")
    parser.add_argument("--nodes", type=int, default=512, help="of the machine, drawn at random")
    parser.add_argument("--jobs", type=int, default=10, help="jobs at a time, for --trace")
    parser.add_argument("--hours", type=float, default=24.0, help="simulated time, for --trace")
    parser.add_argument("--seeds", type=int, default=5, help="draws of nodes, for --trace")
    parser.add_argument(
        "--accuracy", type=Path, metavar="FOLDER", help="of Fashion-MNIST, with --trace"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    if args.predict:
        print(json.dumps({"worst error": predictions()}, indent=1))
        return
    if args.accuracy is not None and args.trace is None:
        raise SystemExit("--accuracy needs --trace FILE, idle nodes of a machine.")
    if args.trace is not None:
        _print_simulated(args)
        return
    outcomes = [run(contender, args.samples) for contender in args.contenders]
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
        return
    print("contender  seconds  own node-s  all node-s  profiles  load  nodes and new plan by batch")
    for o in outcomes:
        by_batch = ", ".join(
            f"{size}: {nodes}" + _after(o.new_plan_s.get(size)) for size, nodes in o.nodes.items()
        )
        print(
            f"{o.contender:9}  {o.seconds:7.1f}  {o.own_node_s:10.3f}  {o.all_node_s:10.3f}  "
            f"{o.profiles:8}  {o.load:4.1f}  {by_batch}"
        )


def _print_simulated(args: argparse.Namespace) -> None:
    if args.node_list is None:
        raise SystemExit("--trace needs --node-list FILE, the names of all nodes of the machine.")
    trace = existing(args.trace, "--trace", "idle nodes of a machine")
    names = existing(args.node_list, "--node-list", "the names of all nodes of the machine")
    if args.accuracy is not None:
        _print_accuracy(args, trace, names)
        return
    rows = simulated(
        trace,
        names,
        nodes=args.nodes,
        count=args.jobs,
        hours=args.hours,
        seeds=args.seeds,
    )
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print("noise/batch  batch on 1, 4, 16 nodes  progress  of each draw")
    for row in rows:
        low, high = row.spread
        print(
            f"{row.noise_scale:11g}  {', '.join(map(str, row.batches)):>23}  {row.progress:8.3f}  "
            f"{low:.3f} to {high:.3f}"
        )


def _print_accuracy(args: argparse.Namespace, trace: Path, names: Path) -> None:
    rows = list(
        batching_accuracy.pairs(
            args.accuracy, trace, names, nodes=args.nodes, hours=args.hours, seeds=args.seeds
        )
    )
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(batching_accuracy.table(rows))


def _after(seconds: float | None) -> str:
    return "" if seconds is None else f" after {seconds:.1f} s"


if __name__ == "__main__":
    main()
