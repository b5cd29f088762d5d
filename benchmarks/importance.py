"""Training until a given accuracy with ImportanceSampler and with uniform sampling, both with a
data cache.

    python -m benchmarks.importance [--data FOLDER] [--samples 10000] [--seeds 5] [--epochs 10]
        [--batch 128] [--fractions 0.25 1.0] [--noise 0.0] [--json FILE]

A network with one hidden layer learns the first ``--samples`` images of Fashion-MNIST. Its accuracy
on the test images is measured every ``--every`` steps. The contenders have the same initial weights
for each seed:

* **uniform**: ElasticSampler, each sample once in an epoch;
* **importance**: ImportanceSampler, losses weighted with ``sampler.weights``;
* **importance, not corrected**: the same with ``correct=False``, as SHADE trains.

The time is computed, so that it does not depend on the load of the machine: a step takes
``--step-ms``, or what reading its samples takes if that is longer. The cache keeps samples from
their first read, up to a fraction of the data, and evicts none, as DataCache does. Each other
sample takes ``--read-ms``, on ``--readers`` processes side by side.

``target`` is an accuracy that all uniform runs reach: the lowest of their best ones. ``ratio`` is
the median over the seeds of the time until a contender first has the target, relative to uniform
with the same seed. A run that never has it counts as infinite. ``--noise``: part of the training
samples with a wrong label.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.needs import existing
from malletrain import ElasticSampler, ImportanceSampler

UNIFORM, CORRECTED, UNCORRECTED = "uniform", "importance", "importance, not corrected"
CONTENDERS = (UNIFORM, CORRECTED, UNCORRECTED)
CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Images as rows of numbers, with their classes."""

    train: Any
    train_labels: Any
    test: Any
    test_labels: Any
    wrong: Any
    """Whether the label of each training sample is wrong."""


@dataclass(frozen=True)
class ReadingModel:
    """Costs of reading."""

    step_s: float
    """Duration of a step whose samples are in memory, seconds."""
    read_s: float
    """Time of one process to read a sample, seconds."""
    readers: int
    """Number of parallel reading processes."""


@dataclass
class Curve:
    """One run."""

    contender: str
    seed: int
    steps: list[int]
    """Number of steps at each measurement of the accuracy."""
    accuracy: list[float]
    time_s: dict[str, list[float]]
    """Fraction of the data in memory → computed time at each measurement, seconds."""
    coverage: float
    """Part of the samples that an epoch trains on, the mean over epochs after the first."""
    wrong: float
    """Part of the draws after the first epoch whose label is wrong."""


class VirtualCache:
    """A cache that keeps samples from their first read while they fit, and the time of a run.

    Args:
        samples: number of samples of the data.
        fraction: part of them that fits.
        reading: what reading costs.
    """

    def __init__(self, samples: int, fraction: float, reading: ReadingModel) -> None:
        self._present = torch.zeros(samples, dtype=torch.bool)
        self._room, self._reading = round(fraction * samples), reading
        self.seconds = 0.0
        """Time of the run so far, seconds."""
        self.reads = 0
        """Samples read from the data set so far."""

    def step(self, batch: Any) -> None:
        """Add the time of a step that trains on the samples ``batch``."""
        missing = batch[~self._present[batch]].unique()
        keep = missing[: self._room]
        self._present[keep] = True
        self._room -= len(keep)
        self.reads += len(missing)
        read_s = len(missing) * self._reading.read_s / self._reading.readers
        self.seconds += max(self._reading.step_s, read_s)


def fashion_mnist(folder: Path, samples: int) -> Images:
    """Return the first ``samples`` training images and all test images of the data set in
    ``folder``.
    """

    def numbers(name: str, header: int) -> Any:
        with gzip.open(folder / name) as file:
            return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header).copy())

    def rows(name: str) -> Any:
        return numbers(name, 16).reshape(-1, 784).float() / 127.5 - 1.0

    labels = numbers("train-labels-idx1-ubyte.gz", 8).long()[:samples]
    return Images(
        rows("train-images-idx3-ubyte.gz")[:samples].clone(),
        labels,
        rows("t10k-images-idx3-ubyte.gz"),
        numbers("t10k-labels-idx1-ubyte.gz", 8).long(),
        torch.zeros(len(labels), dtype=torch.bool),
    )


def with_wrong_labels(images: Images, part: float) -> Images:
    """Return the images with another label for a part of the training samples."""
    generator = torch.Generator().manual_seed(1)
    count = len(images.train_labels)
    wrong = torch.randperm(count, generator=generator)[: round(part * count)]
    labels = images.train_labels.clone()
    shift = torch.randint(1, CLASSES, (len(wrong),), generator=generator)
    labels[wrong] = (labels[wrong] + shift) % CLASSES
    return Images(
        images.train, labels, images.test, images.test_labels, labels != images.train_labels
    )


def sampler_of(contender: str, samples: int, batch: int, seed: int) -> ElasticSampler:
    """Return the sampler of a contender."""
    alone = {"global_batch_size": batch, "seed": seed, "rank": 0, "world_size": 1}
    if contender == UNIFORM:
        return ElasticSampler(samples, **alone)
    return ImportanceSampler(samples, correct=contender == CORRECTED, **alone)


def train(
    contender: str,
    images: Images,
    seed: int,
    epochs: int,
    batch_size: int,
    every: int,
    fractions: Sequence[float],
    reading: ReadingModel,
) -> Curve:
    """Train one contender. ``every``: number of steps between two measurements."""
    torch.manual_seed(seed)
    count = len(images.train)
    model = torch.nn.Sequential(
        torch.nn.Linear(images.train.shape[1], 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, CLASSES),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = sampler_of(contender, count, batch_size, seed)
    caches = {f"{fraction:g}": VirtualCache(count, fraction, reading) for fraction in fractions}
    curve = Curve(contender, seed, [], [], {name: [] for name in caches}, 1.0, 0.0)
    coverage: list[float] = []
    wrong: list[float] = []
    done = 0
    for epoch in range(epochs):
        if epoch:
            coverage.append(sampler.coverage)
        for numbers in sampler:
            batch = torch.tensor(numbers)
            if epoch:
                wrong.append(images.wrong[batch].float().mean().item())
            losses = cross_entropy(
                model(images.train[batch]), images.train_labels[batch], reduction="none"
            )
            weighted = losses
            if isinstance(sampler, ImportanceSampler):
                weighted = losses * sampler.weights
            optimizer.zero_grad()
            weighted.mean().backward()
            optimizer.step()
            if isinstance(sampler, ImportanceSampler):
                sampler.advance(losses=losses)
            else:
                sampler.advance()
            for cache in caches.values():
                cache.step(batch)
            done += 1
            if done % every == 0:
                curve.steps.append(done)
                curve.accuracy.append(accuracy(model, images))
                for name, cache in caches.items():
                    curve.time_s[name].append(cache.seconds)
    if epochs > 1:
        curve.coverage, curve.wrong = mean(coverage), mean(wrong)
    return curve


def accuracy(model: Any, images: Images) -> float:
    """Return the part of the test images whose class ``model`` finds."""
    with torch.no_grad():
        return (model(images.test).argmax(1) == images.test_labels).float().mean().item()


def time_to(curve: Curve, fraction: str, target: float) -> float:
    """Return the time at which a run first had an accuracy, seconds; infinite if it never had."""
    return next(
        (
            seconds
            for seconds, reached in zip(curve.time_s[fraction], curve.accuracy, strict=True)
            if reached >= target
        ),
        math.inf,
    )


def lowest_best(curves: Sequence[Curve]) -> float:
    """Return an accuracy that all runs reach: the lowest of their best ones."""
    return min(max(curve.accuracy) for curve in curves)


def compare(curves: Mapping[str, Sequence[Curve]], fractions: Sequence[float]) -> dict[str, Any]:
    """Return for each contender and fraction the times to the target, relative to uniform.

    Args:
        curves: contender → its runs, in the order of the seeds.
        fractions: parts of the data in memory.
    """
    target = lowest_best(curves[UNIFORM])
    rows = []
    for contender, runs in curves.items():
        for fraction in (f"{each:g}" for each in fractions):
            ratios = [
                time_to(run, fraction, target) / time_to(uniform, fraction, target)
                for run, uniform in zip(runs, curves[UNIFORM], strict=True)
            ]
            rows.append(
                {
                    "contender": contender,
                    "fraction": fraction,
                    "median_s": median(time_to(run, fraction, target) for run in runs),
                    "ratio": median(ratios),
                    "ratios": ratios,
                    "best_accuracy": mean(max(run.accuracy) for run in runs),
                    "coverage": mean(run.coverage for run in runs),
                    "wrong": mean(run.wrong for run in runs),
                }
            )
    return {"target": target, "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """The comparison as text."""
    lines = [
        f"target: {result['target']:.2%}",
        f"{'contender':<27}{'memory':>8}{'time':>9}{'ratio':>7}  {'by seed':<32}"
        f"{'best':>8}{'coverage':>10}{'wrong labels':>14}",
    ]
    for row in result["rows"]:
        by_seed = " ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        lines.append(
            f"{row['contender']:<27}{float(row['fraction']):>8.0%}{row['median_s']:>8.0f}s"
            f"{row['ratio']:>7.2f}  {by_seed:<32}{row['best_accuracy']:>8.2%}"
            f"{row['coverage']:>10.1%}{row['wrong']:>14.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Train all contenders, and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data/fashion_mnist"))
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--read-ms", type=float, default=5.0)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = existing(args.data, "--data", "Fashion-MNIST's train-images-idx3-ubyte.gz")
    torch.set_num_threads(1)
    images = with_wrong_labels(fashion_mnist(folder, args.samples), args.noise)
    reading = ReadingModel(args.step_ms / 1e3, args.read_ms / 1e3, args.readers)
    curves: dict[str, list[Curve]] = {contender: [] for contender in CONTENDERS}
    for seed in range(args.seeds):
        for contender in CONTENDERS:
            curves[contender].append(
                train(
                    contender,
                    images,
                    seed,
                    args.epochs,
                    args.batch,
                    args.every,
                    args.fractions,
                    reading,
                )
            )
            print(f"seed {seed} {contender}: {max(curves[contender][-1].accuracy):.2%}", flush=True)
    result = compare(curves, args.fractions)
    print(table(result))
    if args.json:
        every = [asdict(curve) for runs in curves.values() for curve in runs]
        args.json.write_text(json.dumps({**result, "curves": every}, indent=1))


if __name__ == "__main__":
    main()
