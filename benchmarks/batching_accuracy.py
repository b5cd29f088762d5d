"""Whether a batch that follows the gradient noise reaches the same accuracy sooner
(``python -m benchmarks.batching --accuracy FOLDER --trace FILE --node-list FILE``).

A perceptron with one hidden layer really learns Fashion-MNIST, once with a fixed batch and once
with :class:`malletrain.AdaptiveBatch`; what it takes is computed. The job's nodes are a tenth of
those that a machine has idle, at most :data:`LARGEST`, in a trace that runs :data:`SPEED_UP` times
as fast, because the training is that much shorter than the one of ResNet-50 on ImageNet whose
throughput it has (malletrain.sim.workloads, :func:`benchmarks.batching_simulated.rate`). A change
of nodes costs what a change of 400 MB in live mode costs.

The adaptive training gets its batch in the way a job gets it: its noise scale goes to
malletrain.core.goodput, which returns the best batch on the present nodes, and the agent's flags
file hands that to the training. The throughput at other batches is known, where the daemon has to
predict it. The batch changes at the begin of an epoch, as in restart mode.

Both end after the same number of steps with the fixed batch, which AdaScale's gain counts for the
adaptive one (Johnson et al. 2020, section 3), and both have a learning rate that falls to zero as a
cosine of it.
"""

from __future__ import annotations

import gzip
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import malletrain
from benchmarks.batching_simulated import COSTS, rate
from benchmarks.needs import existing
from malletrain.core.goodput import BatchState, best_batch
from malletrain.protocol import env
from malletrain.protocol.flags import FlagsWriter
from malletrain.training.adaptive_batch import ESTIMATES_BETWEEN_CHANGES
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace

BASE, MOST = 128, 4096
"""The script's global batch and the largest one, samples."""
LARGEST = 16
"""Maximum nodes of the job."""
SHARE = 10
"""The job gets one of this many equal parts of the idle nodes."""
EPOCHS = 20
"""Length of the training with the fixed batch."""
RATE, MOMENTUM = 0.02, 0.9
"""Learning rate at the beginning (for the base batch), and momentum of SGD."""
HIDDEN = 256
TESTS = 40
"""Number of tests of the model, evenly over the training."""
SPEED_UP = 100.0
TOLERANCE = 0.003
"""Maximum difference from the fixed training's last accuracy that counts as the same accuracy."""


@dataclass(frozen=True)
class Training:
    """One training."""

    seconds: float
    """Time until its end, computed."""
    samples: int
    """Samples that it processed."""
    accuracy: float
    """Accuracy on the test images at the end."""
    tests: tuple[tuple[float, float], ...]
    """(seconds, accuracy) during the training."""
    batches: tuple[int, ...]
    """The global batch of each epoch."""

    def time_to(self, accuracy: float) -> float:
        """Return the seconds until the model first has an accuracy; infinite if it never has."""
        return min((s for s, value in self.tests if value >= accuracy), default=math.inf)


@dataclass(frozen=True)
class Pair:
    """Both trainings of a seed."""

    seed: int
    fixed: Training
    adaptive: Training

    @property
    def end_ratio(self) -> float:
        """Time until the end, adaptive relative to fixed."""
        return self.adaptive.seconds / self.fixed.seconds

    @property
    def accuracy_ratio(self) -> float:
        """Time until the same accuracy (TOLERANCE below the fixed one's last), adaptive relative to
        fixed.
        """
        goal = self.fixed.accuracy - TOLERANCE
        return self.adaptive.time_to(goal) / self.fixed.time_to(goal)


class Clock:
    """Computes the time that the training takes on the nodes of a trace. Waits for nodes.

    Args:
        trace: idle nodes of a machine.
    """

    def __init__(self, trace: Trace) -> None:
        times, counts = trace.sped_up(SPEED_UP).idle_count()
        self._times = [*times.tolist(), math.inf]
        self._nodes = np.minimum(counts // SHARE, LARGEST).tolist()
        self._at = 0
        self._before = 0
        """Nodes at the last step."""
        self.seconds = 0.0

    def nodes(self) -> int:
        """Return the job's present nodes. Waits until it has one."""
        while self._times[self._at + 1] <= self.seconds or self._nodes[self._at] == 0:
            self._at += 1
            if self._at == len(self._nodes):
                raise SystemExit("The trace ends before the training; take more hours of it.")
            self.seconds = max(self.seconds, self._times[self._at])
        return int(self._nodes[self._at])

    def step(self, batch: int) -> None:
        """Advance the time by a step with a global batch, and by a change of nodes before it."""
        nodes = self.nodes()
        if nodes != self._before:
            pause = COSTS.up_s if nodes > self._before else COSTS.down_s
            self.seconds += pause if self._before else COSTS.start_s
            self._before = nodes
        self.seconds += batch / rate(nodes, batch)


@dataclass(frozen=True)
class Images:
    """Fashion-MNIST: (N, 784) float32 images with mean 0 and variance 1, (N,) int64 labels."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def of(cls, folder: Path) -> Images:
        """Read the four files of a folder."""
        train, test = _images(folder, "train"), _images(folder, "t10k")
        mean, deviation = train.mean(), train.std()
        return cls(
            (train - mean) / deviation,
            _labels(folder, "train"),
            (test - mean) / deviation,
            _labels(folder, "t10k"),
        )


def _content(path: Path, header: int) -> torch.Tensor:
    with gzip.open(existing(path, "--accuracy", "Fashion-MNIST")) as file:
        return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)


def _images(folder: Path, part: str) -> torch.Tensor:
    return _content(folder / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 784).float() / 255.0


def _labels(folder: Path, part: str) -> torch.Tensor:
    return _content(folder / f"{part}-labels-idx1-ubyte.gz", 8).long()


class Learner:
    """A perceptron with its optimizer, and the number of steps with the base batch so far.

    Args:
        images: the data.
        seed: seed of the parameters and of the order of the samples.
    """

    def __init__(self, images: Images, seed: int) -> None:
        torch.manual_seed(seed)
        self.images = images
        self.model = nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.sampler = malletrain.ElasticSampler(
            len(images.train), global_batch_size=BASE, seed=seed
        )
        self.total_steps = EPOCHS * math.ceil(len(images.train) / BASE)

    def step(self, batch: list[int], done_steps: float) -> None:
        """Make an update. ``done_steps``: steps with the base batch so far."""
        fraction = min(1.0, done_steps / self.total_steps)
        self.optimizer.param_groups[0]["lr"] = RATE * (1.0 + math.cos(math.pi * fraction)) / 2.0
        self.optimizer.zero_grad()
        outputs = self.model(self.images.train[batch])
        nn.functional.cross_entropy(outputs, self.images.train_labels[batch]).backward()
        self.optimizer.step()
        self.sampler.advance()

    def accuracy(self) -> float:
        """Return the fraction of the test images that the model recognises."""
        with torch.no_grad():
            answers = self.model(self.images.test).argmax(1)
        return float((answers == self.images.test_labels).float().mean())


def train(images: Images, trace: Trace, seed: int, adaptive: bool) -> Training:
    """Return a training.

    Args:
        images: the data.
        trace: idle nodes of a machine.
        seed: of the training.
        adaptive: whether its batch follows the gradient noise.
    """
    with _flags() as flags:
        learner = Learner(images, seed)
        batching = (
            malletrain.AdaptiveBatch(learner.sampler, learner.optimizer, most=MOST)
            if adaptive
            else None
        )
        return _run(learner, batching, Clock(trace), flags)


def _run(
    learner: Learner, batching: malletrain.AdaptiveBatch | None, clock: Clock, flags: FlagsWriter
) -> Training:
    done: Callable[[], float]
    steps = samples = 0
    done = (lambda: steps) if batching is None else (lambda: batching.scale_invariant_steps)
    tests, batches = [], []
    for _ in learner.sampler.epochs(100 * EPOCHS):
        batches.append(int(learner.sampler.global_batch_size or 0))
        for batch in learner.sampler:
            learner.step(batch, done())
            clock.step(len(batch))
            steps += 1
            samples += len(batch)
            if batching is not None and steps % ESTIMATES_BETWEEN_CHANGES == 0:
                flags.advise_batch(_advice(batching, batches[-1], clock.nodes()))
            if done() >= learner.total_steps * (len(tests) + 1) / TESTS:
                tests.append((clock.seconds, learner.accuracy()))
            if done() >= learner.total_steps:
                accuracy = learner.accuracy()
                return Training(clock.seconds, samples, accuracy, tuple(tests), tuple(batches))
    raise AssertionError("a training ends after its steps")


def _advice(batching: malletrain.AdaptiveBatch, current: int, nodes: int) -> int:
    """Return the batch that the daemon would advise."""
    state = BatchState(BASE, current, MOST, batching.noise.scale)
    return best_batch(
        nodes, state, lambda k, ratio: rate(k, round(current * ratio)) / rate(k, current)
    )[0]


@contextmanager
def _flags() -> Iterator[FlagsWriter]:
    """The agent's flags file of one training."""
    with tempfile.TemporaryDirectory(prefix="malletrain-batching-") as folder:
        writer = FlagsWriter(str(Path(folder, "flags")))
        os.environ[env.FLAGS] = writer.path
        try:
            yield writer
        finally:
            del os.environ[env.FLAGS]
            writer.close()


def pairs(
    folder: Path, trace: Path, node_list: Path, *, nodes: int, hours: float, seeds: int
) -> Iterator[Pair]:
    """Yield both trainings of each seed.

    Args:
        folder: Fashion-MNIST.
        trace: idle nodes of a machine.
        node_list: names of all its nodes.
        nodes: number of its nodes, drawn at random with the seed.
        hours: length of the trace that is used, from hour 60 on.
        seeds: number of seeds.
    """
    torch.set_num_threads(1)
    images = Images.of(folder)
    begin_s = 60.0 * 3600.0
    window = read(trace, names=read_names(node_list)).window(begin_s, begin_s + hours * 3600.0)
    for seed in range(seeds):
        draw = window.sample(nodes, seed)
        fixed, adaptive = (train(images, draw, seed, follows) for follows in (False, True))
        yield Pair(seed, fixed, adaptive)


def table(rows: list[Pair]) -> str:
    """Return the figures as text."""
    lines = [
        "seed  fixed: s  accuracy  adaptive: s  accuracy  samples  time to the end  to the same "
        "accuracy"
    ]
    for row in rows:
        more = row.adaptive.samples / row.fixed.samples
        lines.append(
            f"{row.seed:4}  {row.fixed.seconds:8.1f}  {row.fixed.accuracy:8.4f}  "
            f"{row.adaptive.seconds:11.1f}  {row.adaptive.accuracy:8.4f}  {more:6.2f}x  "
            f"{row.end_ratio:15.2f}  {row.accuracy_ratio:8.2f}"
        )
    difference = statistics.fmean(row.adaptive.accuracy - row.fixed.accuracy for row in rows)
    lines.append(
        f"median  time to the end {statistics.median(row.end_ratio for row in rows):.2f}, to the "
        f"same accuracy {statistics.median(row.accuracy_ratio for row in rows):.2f}; accuracy "
        f"{100 * difference:+.2f} points in the mean"
    )
    lines.extend(f"batches of seed {row.seed}: {row.adaptive.batches}" for row in rows[:1])
    return "\n".join(lines)
