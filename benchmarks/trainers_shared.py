"""Nodes that trainers leave idle where they share several classes, against one plan of all jobs.

    python -m benchmarks.trainers_shared [--machines 300]

Random machines of two or three classes that two trainers share; the jobs have limits and curves of
many kinds. Prints the nodes, those that one plan of all jobs uses, and those that the trainers'
plans use together. Nothing depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from allocator import NodeInfo, ScalingCurve
from malletrain.core.planning import Candidate, make_plan
from malletrain.core.settings import PlanningSettings
from malletrain.core.trainer_plans import TrainerPlanner
from malletrain.core.trainers import Trainer


def machine(seed: int) -> tuple[dict[str, NodeInfo], list[Candidate]]:
    """One of them: its nodes, and the jobs of both trainers."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 30) for name in ("abc" if rng.random() < 0.3 else "ab")}
    trainers = [Trainer("x"), Trainer("y", part=rng.choice([1.0, 3.0]))]
    jobs = []
    for number in range(rng.randint(2, 12)):
        low = rng.choice([1, 1, 1, 2, 4])
        high = max(low, rng.choice([low, 4, 8, 16, 32]))
        curve = ScalingCurve.of({1: 1.0, high: high ** rng.choice([0.7, 0.9, 1.0])})
        trainer = trainers[number % 2 if rng.random() < 0.7 else 0]
        jobs.append(Candidate(f"j{number}", low, high, (), curve=curve, trainer=trainer))
    return {f"{c}{k}": NodeInfo(c) for c, size in sizes.items() for k in range(size)}, jobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", type=int, default=300)
    args = parser.parse_args()
    settings = PlanningSettings()
    total = together = apart = 0
    for seed in range(args.machines):
        nodes, jobs = machine(seed)
        one = make_plan([replace(c, trainer=None) for c in jobs], nodes, settings)
        several = TrainerPlanner(make_plan)(jobs, nodes, settings)
        total += len(nodes)
        together += sum(map(len, one.nodes.values()))
        apart += sum(map(len, several.nodes.values()))
    print(f"nodes {total}, one plan uses {together}, the trainers' plans {apart}")


if __name__ == "__main__":
    main()
