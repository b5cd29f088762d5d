"""What the training of benchmarks/requeue.py is, whoever runs it: model, data, batch size, and the
records of its steps. Imports nothing of the contenders.

An epoch never ends: sample ``i`` is the digit ``i`` modulo their number, taken in order. The
records of a process are a file: a line when the process is ready, and one for each step
(benchmarks/requeue_account.py reads them). While a step waits in the place of an accelerator, the
file's time is set ten times a second, so that it says when a step was cut short.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

HIDDEN = 1024
"""Width of two hidden layers: 4.5 MB of parameters, 9 MB with the optimizer's state."""
BATCH = 32
"""Samples a step and node."""
SAMPLES = 100_000_000
"""Of an epoch; no run reaches its end."""
BEAT_S = 0.1
DATA = "digits.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every variant of the script."""
    parser.add_argument("folder", type=Path, help="of the data and of the records")
    parser.add_argument("--training", type=int, default=0, help="number of this training")
    parser.add_argument("--step-s", type=float, default=1.0, help="wait in every step, seconds")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder")
    parser.add_argument("--checkpoint-every-s", type=float, default=60.0)
    parser.add_argument("--max-ranks", type=int, default=16)


def arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments of a variant that has no others."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    return parser.parse_args()


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits to a file, so that no training imports scikit-learn."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    torch.save((torch.tensor(features).float() / 16, torch.tensor(labels)), folder / DATA)


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, 10),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Digits:
    """The data, and the loss of a network on them."""

    def __init__(self, folder: Path) -> None:
        self._features, self._labels = torch.load(folder / DATA, weights_only=True)

    def loss(self, net: torch.nn.Module, samples: list[int]) -> torch.Tensor:
        """The mean loss over these samples."""
        rows = torch.tensor(samples) % len(self._labels)
        return torch.nn.functional.cross_entropy(net(self._features[rows]), self._labels[rows])


class StepLog:
    """The records of this process.

    Args:
        folder: of the benchmark; the file lies in ``folder/steps``.
        training: number of the training.
        step_s: how long the accelerator that a step stands for computes, seconds.
    """

    def __init__(self, folder: Path, training: int, step_s: float) -> None:
        node = os.environ.get("MALLETRAIN_NODE") or os.environ.get("SLURMD_NODENAME", "")
        path = folder / "steps" / f"{training}-{node}-{os.getpid()}-{time.time_ns()}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._step_s, self._began, self._position = step_s, 0.0, 0
        self._write(f"{training} {node} {time.time():.4f}\n")

    def begin(self, position: int) -> None:
        """A step begins at this position of the training (number of samples before it)."""
        self._began, self._position = time.time(), position
        os.utime(self._file)

    def wait_for_accelerator(self) -> None:
        """Wait for as long as the accelerator computes."""
        end = time.time() + self._step_s
        while (remaining_s := end - time.time()) > 0:
            time.sleep(min(BEAT_S, remaining_s))
            os.utime(self._file)

    def end(self, world: int, *, aborted: bool = False) -> None:
        """The step is over, on so many nodes; ``aborted``: it does not count."""
        total = 0 if aborted else BATCH * world
        self._write(f"{self._began:.4f} {time.time():.4f} {self._position} {total}\n")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())
