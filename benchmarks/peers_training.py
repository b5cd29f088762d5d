"""The training of benchmarks/peers.py, the same in every framework: its model, its samples and its
log. Imports torch, and none of the frameworks.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

WIDTH = 512
BATCH = 12
"""Number of samples of a step over all ranks, the same for any number of ranks."""
SAMPLES = 3_000_000
"""Number of samples of an epoch, in order; no run reaches its end."""


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line of every variant of the script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", help="folder of the logs")
    parser.add_argument("--mb", type=float, default=10.0, help="parameters in MB")
    parser.add_argument("--step-s", type=float, default=0.05, help="sleep in every step")
    parser.add_argument("--checkpoint", required=True, help="file, or folder for Ray")
    parser.add_argument("--checkpoint-every-s", type=float, default=2.0)
    parser.add_argument("--max-ranks", type=int, default=4)
    return parser.parse_args()


def network(mb: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of ``mb`` MB of parameters, and its optimizer, which has as much state."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = max(1, round(mb * 1e6 / 4 / WIDTH / WIDTH))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def loss_of(net: torch.nn.Module, samples: list[int]) -> torch.Tensor:
    """Return the loss over these samples, whose features are computed from their numbers."""
    numbers = torch.tensor(samples or [0], dtype=torch.float32)
    features = torch.sin(numbers[:, None] * torch.arange(1, WIDTH + 1) / WIDTH)
    return net(features).square().mean() * (len(samples) / BATCH)


def share(step: int, rank: int, world: int) -> list[int]:
    """Return the samples of ``rank`` of ``world`` in step ``step`` (from 1)."""
    return list(range((step - 1) * BATCH + rank, step * BATCH, world))


class Log:
    """This process's log; see :mod:`benchmarks.peers_account`."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, f"rank-{os.getpid()}-{time.time_ns()}")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def draw(self, step: int, world: int, rank: int, samples: list[int]) -> None:
        """Log, before the step, the samples that this process takes."""
        ids = " ".join(map(str, samples))
        self._write(f"{time.time():.6f} draw {step} {world} {rank} {ids}\n")

    def done(self, step: int, world: int, rank: int) -> None:
        """Log that the step is done and counts."""
        self._write(f"{time.time():.6f} done {step} {world} {rank}\n")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())
