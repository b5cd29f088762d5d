"""Random but realistic allocation problems, shared by the allocator's benchmarks.

Kinds of jobs (all seeded, all on one class of nodes):

* ``measured``: each job its own curve, known at powers of two, straight between: ``base · k / (1 + s (k - 1))`` with a
  log-normal base, a serial part s of 0.01-3 % and 5 % noise at each point, so that most curves are not concave. What a
  profiled job looks like;
* ``rough``: the same, known with its noise at every size, one size in fifty not working at all (throughput 0);
* ``same``: one curve for all jobs, which run at different sizes. A sweep under way;
* ``sweep``: one curve for all jobs, none running. A sweep that has just been submitted;
* ``file``: curves drawn at random from a CSV file with columns model, nodes, samples_per_s.

Nine of ten jobs of all kinds but ``sweep`` run, at random sizes, until the machine is full.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allocator import NodeInfo, ScalingCurve

KINDS = ("measured", "rough", "same", "sweep")


@dataclass(frozen=True)
class Instance:
    """Jobs with their curves and the nodes they run on, and all nodes of the machine."""

    curves: tuple[ScalingCurve, ...]
    current: dict[str, tuple[str, ...]]
    nodes: dict[str, NodeInfo]
    max_size: int

    @property
    def jobs(self) -> list[str]:
        return list(self.current)


def read_curves(path: Path) -> list[ScalingCurve]:
    """The curves of a CSV file with columns model, nodes, samples_per_s."""
    points: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            points.setdefault(row["model"], {})[int(row["nodes"])] = float(row["samples_per_s"])
    return [ScalingCurve.of(known) for known in points.values()]


def random_curve(rng: np.random.Generator, max_size: int, *, rough: bool) -> ScalingCurve:
    """A curve with a point at each power of two and at ``max_size``, or at every size."""
    powers = 1 << np.arange(max_size.bit_length())
    sizes = np.arange(1, max_size + 1) if rough else np.unique(np.append(powers, max_size))
    serial = 10.0 ** rng.uniform(-4.0, -1.5)
    rates = np.exp(rng.normal(7.0, 1.0)) * sizes / (1.0 + serial * (sizes - 1)) * np.exp(rng.normal(0.0, 0.05, len(sizes)))
    if rough:
        rates[rng.random(len(rates)) < 0.02] = 0.0
    return ScalingCurve(tuple(zip(sizes.tolist(), rates.tolist(), strict=True)))


def instance(seed: int, nodes: int, jobs: int, max_size: int, kind: str, known: Sequence[ScalingCurve] = ()) -> Instance:
    """One problem; the same arguments give the same problem."""
    rng = np.random.default_rng(seed)
    names = [f"n{i:05}" for i in range(nodes)]
    if kind == "file":
        curves = tuple(known[i] for i in rng.integers(0, len(known), jobs))
    elif kind in ("same", "sweep"):
        curves = (random_curve(rng, max_size, rough=False),) * jobs
    else:
        curves = tuple(random_curve(rng, max_size, rough=kind == "rough") for _ in range(jobs))
    current: dict[str, tuple[str, ...]] = {}
    at = 0
    for j in range(jobs):
        size = 0
        if kind != "sweep" and rng.random() < 0.9:
            size = min(int(rng.integers(0, max_size + 1)), max(1, 2 * nodes // jobs), nodes - at)
        current[f"j{j:04}"] = tuple(names[at : at + size])
        at += size
    return Instance(curves, current, {name: NodeInfo() for name in names}, max_size)
