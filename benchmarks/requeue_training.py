"""The training of benchmarks/requeue.py in all contenders: model, data, batch size, and the records
of its steps. Imports nothing of the contenders.

An epoch never ends: sample ``i`` is the digit ``i`` modulo their number, in order. The records of a
process are a file: a line when the process is ready, and one for each step
(benchmarks/requeue_account.py reads them). While a step waits in place of an accelerator, the
file's time is updated ten times per second, so that the time of an interruption is known.
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
"""Number of samples per step and node."""
SAMPLES = 100_000_000
"""Number of samples of an epoch; no run reaches its end."""
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
    """Return the arguments of a variant without further ones."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    return parser.parse_args()


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits to a file, so that no training imports scikit-learn."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    torch.save((torch.tensor(features).float() / 16, torch.tensor(labels)), folder / DATA)


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
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
        """Return the mean loss over these samples."""
        rows = torch.tensor(samples) % len(self._labels)
        return torch.nn.functional.cross_entropy(net(self._features[rows]), self._labels[rows])


class StepLog:
    """The records of this process.

    Args:
        folder: folder of the benchmark; the file is in ``folder/steps``.
        training: number of the training.
        step_s: computing time of the simulated accelerator per step, seconds.
    """

    def __init__(self, folder: Path, training: int, step_s: float) -> None:
        node = os.environ.get("MALLETRAIN_NODE") or os.environ.get("SLURMD_NODENAME", "")
        path = folder / "steps" / f"{training}-{node}-{os.getpid()}-{time.time_ns()}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._step_s, self._began, self._position = step_s, 0.0, 0
        self._write(f"{training} {node} {time.time():.4f}\n")

    def begin(self, position: int) -> None:
        """Record that a step begins at this position of the training (number of samples before
        it).
        """
        self._began, self._position = time.time(), position
        os.utime(self._file)

    def wait_for_accelerator(self) -> None:
        """Wait for the computing time of the accelerator."""
        end = time.time() + self._step_s
        while (remaining_s := end - time.time()) > 0:
            time.sleep(min(BEAT_S, remaining_s))
            os.utime(self._file)

    def end(self, world: int, *, aborted: bool = False) -> None:
        """Record the end of the step on ``nodes`` nodes; ``aborted``: it does not count."""
        total = 0 if aborted else BATCH * world
        self._write(f"{self._began:.4f} {time.time():.4f} {self._position} {total}\n")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())
