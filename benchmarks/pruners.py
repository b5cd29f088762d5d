"""Compares EarlyCurve with ASHA, Hyperband, the median and no pruning, on learning curves of
completed trainings: the difference between the chosen training and the best, and the cost of the
search.

    python -m benchmarks.pruners --table ../shared/data/nasbench/nasbench101_sample30k.csv.gz
    python -m benchmarks.pruner_curves ../shared/data/fashion_mnist curves.json
    python -m benchmarks.pruners --curves curves.json

For each seed some trainings are drawn. All pruners see the same ones in the same order, several at
a time, asynchronously. In NAS-Bench-101's sample an epoch takes a cell its share of its measured
training time. Accuracies are those after 4, 12, 36 and 108 epochs, each of a training of that
length, so that a curve is not exactly that of one training. Curves of
:mod:`benchmarks.pruner_curves` have a value for each epoch.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import TrialState

from malletrain.sweep.pruner import EarlyCurvePruner

NASBENCH_STEPS = (4, 12, 36, 108)

Make = Callable[[int, int], optuna.pruners.BasePruner]
PRUNERS: dict[str, Make] = {
    "none": lambda first, last: optuna.pruners.NopPruner(),
    "median": lambda first, last: optuna.pruners.MedianPruner(
        n_startup_trials=5, n_warmup_steps=first - 1
    ),
    "asha": lambda first, last: optuna.pruners.SuccessiveHalvingPruner(
        min_resource=first, reduction_factor=3
    ),
    "hyperband": lambda first, last: optuna.pruners.HyperbandPruner(
        min_resource=first, max_resource=last, reduction_factor=3
    ),
    **{
        f"earlycurve {share}": lambda first, last, theta=theta: EarlyCurvePruner(
            last, theta=theta, keep=3, startup=5, bounds=(0, 1)
        )
        for share, theta in (("1/3", 1 / 3), ("2/3", 2 / 3))
    },
}
"""Name → pruner, from the first step with a value and the last step."""


@dataclass(frozen=True)
class TrainedCurve:
    """A completed training."""

    steps: tuple[int, ...]
    """Steps with a value."""
    accuracy: tuple[float, ...]
    """Value after each of them."""
    epoch_s: float


@dataclass(frozen=True)
class Search:
    """The result of one search."""

    regret: float
    """Difference between the chosen training and the best one that was drawn."""
    samples: float
    """Trained epochs, as a share of those of all trainings to their end."""
    hours: float
    """Time until the last trial ended, seconds."""


def read_table(path: Path) -> list[TrainedCurve]:
    """Return all cells of NAS-Bench-101's sample."""
    with gzip.open(path, "rt") as file:
        return [
            TrainedCurve(
                NASBENCH_STEPS,
                tuple(float(row[f"val_acc_{step}ep"]) for step in NASBENCH_STEPS),
                float(row["training_time_s_108ep"]) / NASBENCH_STEPS[-1],
            )
            for row in csv.DictReader(file)
        ]


def read_curves(path: Path) -> list[TrainedCurve]:
    """Return the curves of :mod:`benchmarks.pruner_curves`."""
    return [
        TrainedCurve(tuple(range(1, len(row["accuracy"]) + 1)), tuple(row["accuracy"]), 1.0)
        for row in json.loads(path.read_text())["curves"]
    ]


def search(curves: Sequence[TrainedCurve], make: Make, slots: int) -> Search:
    """Train along ``curves``, several at a time, each until it is pruned."""
    steps = curves[0].steps
    pruner = make(steps[0], steps[-1])
    study = optuna.create_study(direction="maximize", pruner=pruner, study_name="s")
    due: list[tuple[float, int, int, optuna.Trial]] = []
    waiting = list(reversed(list(enumerate(curves))))
    epochs = now = 0.0

    def begin(at: float) -> None:
        if waiting:
            number, curve = waiting.pop()
            heapq.heappush(due, (at + steps[0] * curve.epoch_s, number, 0, study.ask()))

    for _ in range(slots):
        begin(0.0)
    while due:
        now, number, stage, trial = heapq.heappop(due)
        curve = curves[number]
        epochs += steps[stage] - (steps[stage - 1] if stage else 0)
        trial.report(curve.accuracy[stage], steps[stage])
        if stage + 1 == len(steps):
            study.tell(trial, curve.accuracy[stage])
        elif trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
        else:
            more = (steps[stage + 1] - steps[stage]) * curve.epoch_s
            heapq.heappush(due, (now + more, number, stage + 1, trial))
            continue
        begin(now)
    ended = [
        t.value for t in study.trials if t.state == TrialState.COMPLETE and t.value is not None
    ]
    best = max(curve.accuracy[-1] for curve in curves)
    return Search(best - max(ended, default=0.0), epochs / (steps[-1] * len(curves)), now / 3600)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--table", type=Path, help="NAS-Bench-101's sample")
    source.add_argument("--curves", type=Path, help="what benchmarks.pruner_curves has written")
    parser.add_argument("--trials", type=int, default=100, help="drawn for each search")
    parser.add_argument("--slots", type=int, default=8, help="trials at a time")
    parser.add_argument("--seeds", type=int, default=20, help="how many searches")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first search")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = read_table(args.table) if args.table else read_curves(args.curves)
    drawn = min(args.trials, len(table))
    searches_by_pruner: dict[str, list[Search]] = {name: [] for name in PRUNERS}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        curves = random.Random(seed).sample(table, drawn)
        for name, make in PRUNERS.items():
            searches_by_pruner[name].append(search(curves, make, args.slots))
    rows = [
        {
            "pruner": name,
            "regret": statistics.mean(s.regret for s in searches),
            "worst_regret": max(s.regret for s in searches),
            "samples": statistics.mean(s.samples for s in searches),
            "hours": statistics.mean(s.hours for s in searches),
        }
        for name, searches in searches_by_pruner.items()
    ]
    if args.json:
        print(json.dumps({"trials": drawn, "seeds": args.seeds, "rows": rows}))
        return
    print(f"{drawn} trials, {args.slots} at a time, {args.seeds} seeds")
    print(f"{'pruner':24}{'regret':>10}{'worst':>10}{'samples':>10}{'hours':>10}")
    for row in rows:
        print(
            f"{row['pruner']:24}{row['regret']:10.4f}{row['worst_regret']:10.4f}"
            f"{row['samples']:10.3f}{row['hours']:10.2f}"
        )


if __name__ == "__main__":
    main()
