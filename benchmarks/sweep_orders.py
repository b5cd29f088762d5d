"""Measures how much the best value of a sweep by ASHA depends on chance: the trials of
``benchmarks.sweep`` are trained once each by themselves, and their curves pruned in many orders.

    python -m benchmarks.sweep_orders --trials 9 --epochs 9 --nodes 4 --at-once 6 --orders 200

ASHA judges a trial by those that reached its rung earlier, so the order of the reports decides
which trials are completed. Each order here is a schedule of as many workers as there are nodes (or
simultaneous trials): an epoch takes the same time except for ``--jitter``, and with ``--away`` a
worker is away for 3 to 20 seconds after that part of its epochs. The pruner is Optuna's. Nothing
depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
import heapq
import random
import runpy
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.sweep import values
from malletrain import ElasticSampler
from malletrain.demo.main import example_script

EPOCH_S = 1.4
BATCH = 128


def curve_of(tried: dict[str, Any], epochs: int, example: dict[str, Any]) -> list[float]:
    """Return the accuracy after each epoch, as jobscripts/examples/digits.py has it on one node."""
    train, test = example["load_digits"]()
    torch.manual_seed(0)
    hidden = tried["hidden"]
    model = nn.Sequential(
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=tried["lr"], momentum=0.9)
    sampler = ElasticSampler(len(train), global_batch_size=BATCH, seed=0)
    results = []
    for _ in sampler.epochs(epochs):
        for images, labels in DataLoader(train, batch_sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            sampler.advance()
        results.append(float(example["accuracy"](model, test)))
    return results


def in_order(
    curves: Sequence[Sequence[float]], workers: int, jitter: float, away: float, seed: int
) -> tuple[float, int]:
    """Return the best value at the end of a trial, and the number of trained epochs, in one random
    order.
    """
    rng = random.Random(seed)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    begun: list[optuna.Trial] = []
    epochs, best = 0, 0.0
    queue = [(rng.uniform(2.0, 6.0), worker, -1, 0) for worker in range(workers)]
    heapq.heapify(queue)
    while queue:
        now, worker, number, epoch = heapq.heappop(queue)
        if number >= 0:
            epochs += 1
            curve, trial = curves[number], begun[number]
            trial.report(curve[epoch - 1], epoch)
            if epoch == len(curve):
                best = max(best, curve[-1])
                study.tell(trial, curve[-1])
                number = -1
            elif trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                number = -1
        if number < 0:
            if len(begun) == len(curves):
                continue
            number, epoch = len(begun), 0
            begun.append(study.ask())
        took = EPOCH_S * rng.uniform(1.0 - jitter, 1.0 + jitter)
        if rng.random() < away:
            took += rng.uniform(3.0, 20.0)
        heapq.heappush(queue, (now + took, worker, number, epoch + 1))
    return best, epochs


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--jitter", type=float, default=0.15)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the values that are tried")
    parser.set_defaults(sample_delay=0.0)
    args = parser.parse_args()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    example = runpy.run_path(str(example_script()))
    tried = values(args)
    curves = [curve_of(each, args.epochs, example) for each in tried]
    for number, (each, curve) in enumerate(zip(tried, curves, strict=True)):
        print(f"trial {number}: lr {each['lr']:.4f} hidden {each['hidden']:3} {curve[-1]:.4f}")
    for workers in sorted({args.nodes, args.at_once}):
        for away in (0.0, 0.1):
            runs = [in_order(curves, workers, args.jitter, away, k) for k in range(args.orders)]
            bests = Counter(round(best, 4) for best, _ in runs)
            shares = ", ".join(f"{v:.4f} {n / args.orders:.1%}" for v, n in bests.most_common(6))
            mean = sum(best for best, _ in runs) / args.orders
            epochs = sum(count for _, count in runs) / args.orders
            print(
                f"{workers} workers, away {away:g}: mean {mean:.4f} ({shares}); {epochs:.0f} epochs"
            )


if __name__ == "__main__":
    main()
