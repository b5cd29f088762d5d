"""Model jobs for the tests: throughput laws, the measured curves where they are present, and a job
that reports progress.
"""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from pathlib import Path

SUMMIT = Path(__file__).resolve().parents[3] / "shared" / "data" / "dnn_scaling_summit.csv"


def summit() -> dict[str, dict[int, float]]:
    """Measured curves of seven models on 1..64 nodes, by name; empty where the data is not
    present.
    """
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    if SUMMIT.exists():
        with SUMMIT.open() as file:
            for row in csv.DictReader(file):
                curves[row["model"]][int(row["nodes"])] = float(row["samples_per_s"])
    return dict(curves)


def fixed_global_batch(communication: float, latency: float = 0.0, rate: float = 100.0):
    """Amdahl-like: seconds per step = 1/k + communication·(k−1)/k + latency·log2 k; samples/s by
    nodes.
    """
    return lambda k: rate / (1 / k + communication * (k - 1) / k + latency * math.log2(k))


def linear(k: int) -> float:
    return 100.0 * k


class Job:
    """Reports after every step on a virtual clock. ``rate(k)`` in samples/s; ``noise``: relative
    scatter of a step's duration.
    """

    def __init__(self, rate, noise: float = 0.03, seed: int = 0, steps_per_s: float = 5.0) -> None:
        self.rate, self.noise, self.random = rate, noise, random.Random(seed)
        self.steps_per_s = steps_per_s
        self.samples = 0.0

    def step(self, nodes: int) -> float:
        """Process one step at ``nodes``; return its duration, infinite when the job stands still
        at that size.
        """
        rate = self.rate(nodes)
        if rate <= 0:
            return math.inf
        seconds = 1 / self.steps_per_s * max(0.1, self.random.gauss(1, self.noise))
        self.samples += rate / self.steps_per_s
        return seconds
