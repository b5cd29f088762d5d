"""Random but realistic allocation problems, shared by the allocator's benchmarks.

Kinds of jobs (all seeded):

* ``measured``: each job its own curve, known at powers of two, straight between: ``base · k / (1 +
  s (k - 1))`` with a log-normal base, a serial part s of 0.01-3 % and 5 % noise at each point, so
  that most curves are not concave. What a profiled job looks like;
* ``rough``: the same, known with its noise at every size, one size in fifty not working at all
  (throughput 0);
* ``same``: one curve for all jobs, which run at different sizes. A sweep under way;
* ``sweep``: one curve for all jobs, none running. A sweep that has just been submitted;
* ``file``: curves drawn at random from a CSV file with columns model, nodes, samples_per_s.

Nine of ten jobs of all kinds but ``sweep`` run, at random sizes, until the machine is full.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allocator import Bid, NodeInfo, ScalingCurve, make_bid

KINDS = ("measured", "rough", "same", "sweep")


@dataclass(frozen=True)
class Instance:
    """Jobs with their curves (one per class of nodes) and their nodes, and all nodes of the
    machine.
    """

    curves: dict[str, dict[str, ScalingCurve]]
    current: dict[str, tuple[str, ...]]
    nodes: dict[str, NodeInfo]
    max_size: int

    def bid(self, job: str, on: Sequence[str]) -> Bid:
        """Return the bid of a job that runs on the nodes ``on``."""
        curves = self.curves[job]
        home = self.nodes[on[0]].pool if on else next(iter(curves))
        return make_bid(job, curves, current=len(on), current_pool=home, max_nodes=self.max_size)


def capacity(nodes: Mapping[str, NodeInfo]) -> dict[str, int]:
    """Nodes by class."""
    return dict(Counter(info.pool for info in nodes.values()))


def read_curves(path: Path) -> list[ScalingCurve]:
    """Return the curves of a CSV file with columns model, nodes, samples_per_s."""
    points: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            points.setdefault(row["model"], {})[int(row["nodes"])] = float(row["samples_per_s"])
    return [ScalingCurve.of(curve_points) for curve_points in points.values()]


def random_curve(rng: np.random.Generator, max_size: int, *, rough: bool) -> ScalingCurve:
    """Return a curve with a point at each power of two and at ``max_size``, or at every size."""
    powers = 1 << np.arange(max_size.bit_length())
    sizes = np.arange(1, max_size + 1) if rough else np.unique(np.append(powers, max_size))
    serial = 10.0 ** rng.uniform(-4.0, -1.5)
    rates = (
        np.exp(rng.normal(7.0, 1.0))
        * sizes
        / (1.0 + serial * (sizes - 1))
        * np.exp(rng.normal(0.0, 0.05, len(sizes)))
    )
    if rough:
        rates[rng.random(len(rates)) < 0.02] = 0.0
    return ScalingCurve(tuple(zip(sizes.tolist(), rates.tolist(), strict=True)))


def instance(
    seed: int,
    nodes: int,
    jobs: int,
    max_size: int,
    kind: str,
    stated_curves: Sequence[ScalingCurve] = (),
    classes: int = 1,
) -> Instance:
    """Return one problem; the same arguments return the same problem. With several classes, each
    has a part of the nodes, and a job's curve on each is its own times a random speed of 0.5-2.
    """
    rng = np.random.default_rng(seed)
    names = [f"n{i:05}" for i in range(nodes)]
    infos = {
        name: NodeInfo("default" if classes == 1 else f"class{i * classes // nodes}")
        for i, name in enumerate(names)
    }
    if kind == "file":
        curves = tuple(stated_curves[i] for i in rng.integers(0, len(stated_curves), jobs))
    elif kind in ("same", "sweep"):
        curves = (random_curve(rng, max_size, rough=False),) * jobs
    else:
        curves = tuple(random_curve(rng, max_size, rough=kind == "rough") for _ in range(jobs))
    labels = [f"j{j:04}" for j in range(jobs)]
    by_class = {label: {"default": curve} for label, curve in zip(labels, curves, strict=True)}
    if classes > 1:
        speeds = 2.0 ** rng.uniform(
            -1.0, 1.0, (jobs if kind not in ("same", "sweep") else 1, classes)
        )
        for j, label in enumerate(labels):
            by_class[label] = {
                f"class{c}": _faster(curves[j], float(s))
                for c, s in enumerate(speeds[j % len(speeds)])
            }
    current: dict[str, tuple[str, ...]] = {}
    at = 0
    for j in range(jobs):
        size = 0
        if kind != "sweep" and rng.random() < 0.9:
            size = min(int(rng.integers(0, max_size + 1)), max(1, 2 * nodes // jobs), nodes - at)
        if size and infos[names[at]] != infos[names[at + size - 1]]:  # a job runs on one class
            while infos[names[at + size - 1]] != infos[names[at]]:
                size -= 1
        current[labels[j]] = tuple(names[at : at + size])
        at += size
    return Instance(by_class, current, infos, max_size)


def _faster(curve: ScalingCurve, speed: float) -> ScalingCurve:
    return ScalingCurve(tuple((size, speed * rate) for size, rate in curve.points))
