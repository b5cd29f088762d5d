"""A sweep of malleable trials beside the same trials on fixed slots of one node, and beside Optuna
alone, on nodes that come and go: the demo's trace, one machine, one after the other.

    python -m benchmarks.sweep
    python -m benchmarks.sweep --trials 9 --epochs 9 --nodes 4 --duration 90    # minutes

All are sweeps by ASHA over the same values in the same order, on the same trace from its beginning.

* *malleable*: trials go on from their snapshots, and share what is idle.
* *slots*: trials have one node each, as many at a time as there are nodes, and begin anew when
  their node is taken, as a job without snapshots does.
* *optuna*: a process of Optuna on each idle node, with heartbeat, retries and checkpoints
  (benchmarks/sweep_optuna.py).
* *ray*: Ray Tune with its ResourceChangingScheduler, in an environment of its own that is made when
  it is asked for (``--ways malleable slots optuna ray``; benchmarks/sweep_ray.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna

from benchmarks import sweep_optuna, sweep_ray
from malletrain.demo import plan
from malletrain.demo.main import DemoOptions, cut_trace, example_script
from malletrain.demo.stage import DemoStage
from malletrain.sweep import Sweep, run_sweep
from malletrain.sweep.ledger import NODE_S
from malletrain.sweep.search import sampler_of, suggest
from scavenger.trace import files
from scavenger.trace.trace import Trace

WAYS = ("malleable", "slots", "optuna", "ray")
IMAGES = 1437
"""Number of digits that an epoch trains on."""
WATCHED_S = 3600.0
"""Maximum duration of a sweep, seconds; the cluster lives a little longer."""


@dataclass(frozen=True)
class SweepCost:
    """The results of a sweep."""

    way: str
    """How its trials ran."""
    wall_s: float
    """Time from its beginning to its end, seconds."""
    best: float
    """The best accuracy at the end of a trial."""
    trials: dict[str, int]
    """State → number of trials."""
    processed: float
    """Samples that its jobs trained on."""
    thrown_away: float
    """Number of these samples that no reported epoch contains."""
    used_s: float
    """Node-seconds that its trials had."""
    idle_s: float
    """Node-seconds that the trace offered meanwhile and no trial had."""


def described(way: str, args: argparse.Namespace, workdir: Path) -> Sweep:
    """Run the sweep in one of the two ways."""
    malleable = way == "malleable"
    words = ["--epochs", args.epochs, "--evaluate-every", 1, "--sample-delay", args.sample_delay]
    if malleable:
        words += ["--snapshot", "--snapshot-every", 5]
    return Sweep.model_validate(
        {
            "sweep": {
                "name": way,
                "metric": "accuracy",
                "direction": "maximize",
                "trials": args.trials,
                "at_once": args.at_once if malleable else args.nodes,
                "every": "500 ms",
                "most_failed": args.trials,
            },
            "job": {
                "script": str(example_script()),
                "args": [str(word) for word in words],
                "nodes": f"1:{args.most_nodes}" if malleable else "1",
                "workdir": str(workdir),
                "profile": "off",
            },
            "space": {
                "lr": {"low": 1e-3, "high": 1.0, "log": True},
                "hidden": [16, 32, 64, 128],
            },
            "sampler": {"kind": "random", "seed": args.seed},
            "pruner": {"kind": "asha", "max_steps": args.epochs},
        }
    )


def values(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the values of the trials: the first draws of the sweep's sampler."""
    sweep = described("slots", args, Path())
    study = optuna.create_study(sampler=sampler_of(sweep))
    parameters = sweep.parameters
    proposals = [study.ask() for _ in range(args.trials)]
    return [{name: suggest(t, name, p) for name, p in parameters.items()} for t in proposals]


def contender(way: str, args: argparse.Namespace) -> SweepCost:
    """Run one of the other contenders."""
    cut = cut_trace(options_of(args, Path(tempfile.gettempdir())))
    run = {"optuna": sweep_optuna.run, "ray": sweep_ray.run}[way]
    outcome = run(values(args), cut, example_script(), args)
    thrown = max(0.0, outcome["processed"] - IMAGES * outcome.pop("steps"))
    idle = max(0.0, offered_s(cut, outcome["wall_s"], args.nodes) - outcome["used_s"])
    return SweepCost(way, **outcome, thrown_away=thrown, idle_s=idle)


def options_of(args: argparse.Namespace, root: Path) -> DemoOptions:
    """Return the factor by which the demo's trace is shortened."""
    return DemoOptions(args.nodes, None, args.duration, args.seed, False, True, False, root)


def offered_s(cut: Trace, wall_s: float, nodes: int) -> float:
    """Return the node-seconds that were idle until ``wall_s``; after the trace all nodes are
    idle.
    """
    times, counts = cut.idle_count()
    idle = list(zip(times.tolist(), counts.tolist(), strict=True))
    offered = plan.offered_node_seconds(idle, min(wall_s, cut.duration_s))
    return offered + max(0.0, wall_s - cut.duration_s) * nodes


def measured(way: str, args: argparse.Namespace) -> SweepCost:
    """Run one sweep on a stage of its own."""
    if way in ("optuna", "ray"):
        return contender(way, args)
    root = Path(tempfile.mkdtemp(prefix=f"sweep-{way}-"))
    with DemoStage(root / "stage") as stage:
        folder = stage.folder
        folder.config.write_text(
            plan.config_text(folder.state, folder.cluster, stage.port, args.nodes)
        )
        cut = cut_trace(options_of(args, root))
        files.write(cut, folder.trace)
        stage.start_cluster(
            args.nodes,
            WATCHED_S,
            trace=folder.trace,
            trace_end_s=cut.duration_s,
            at_end="idle",
            grace_s=plan.GRACE_S,
            notice_fraction=plan.NOTICE,
            seed=args.seed,
        )
        stage.start_daemon()
        client = stage.client()  # once it answers
        began = time.time()
        study = run_sweep(described(way, args, folder.root), folder.state, print)
        wall = time.time() - began
        processed = client.status().samples
    states: dict[str, int] = {}
    for trial in study.trials:
        states[trial.state.name.lower()] = states.get(trial.state.name.lower(), 0) + 1
    counted = IMAGES * sum(trial.last_step or 0 for trial in study.trials)
    used = sum(trial.user_attrs.get(NODE_S, 0.0) for trial in study.trials)
    best = max((t.value or 0.0 for t in study.trials if t.state.name == "COMPLETE"), default=0.0)
    return SweepCost(
        way,
        wall,
        best,
        states,
        processed,
        max(0.0, processed - counted),
        used,
        max(0.0, offered_s(cut, wall, args.nodes) - used),
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--most-nodes", type=int, default=4, help="of a malleable trial")
    parser.add_argument("--at-once", type=int, default=6, help="malleable trials at a time")
    parser.add_argument("--duration", type=float, default=300.0, help="of the trace, seconds")
    parser.add_argument("--sample-delay", type=float, default=0.001, help="seconds a sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: list[dict[str, Any]] = [asdict(measured(way, args)) for way in args.ways]
    if args.json:
        print(json.dumps(results))
        return
    for row in results:
        print(
            f"{row['way']:10} {row['wall_s']:7.0f} s  best {row['best']:.4f}  {row['trials']}  "
            f"{row['processed']:,.0f} samples, {row['thrown_away']:,.0f} thrown away  "
            f"{row['used_s']:,.0f} node-seconds used, {row['idle_s']:,.0f} idle"
        )
    first = results[0]
    for row in results[1:]:
        part = first["wall_s"] / row["wall_s"]
        print(f"{first['way']} ÷ {row['way']}: {part:.2f} of the time")


if __name__ == "__main__":
    main()
