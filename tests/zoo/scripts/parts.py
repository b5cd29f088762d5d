"""Parts of the zoo's scripts: numbered samples, a small model, an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

SAMPLES, BATCH, EPOCHS = 22, 6, 3
"""Four steps an epoch, the last one of four samples: uneven on three ranks."""


class Numbered(Dataset[Any]):
    """Samples that say which they are: (inputs, target, number)."""

    def __init__(self, count: int = SAMPLES, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[number], self.targets[number], number


def make_model(seed: int = 1) -> nn.Sequential:
    """Two layers of float64, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of its first group."""
    return float(optimizer.param_groups[0]["lr"])


@torch.no_grad()
def evaluate(model: nn.Module, seed: int = 4) -> float:
    """Loss on samples that are not trained on, by this rank alone."""
    test = Numbered(9, seed)
    return float(((model(test.inputs) - test.targets) ** 2).mean())


@torch.no_grad()
def evaluate_together(model: nn.Module) -> float:
    """Return the loss, of which each rank computes a part: a collective of the script."""
    test = Numbered(9, 4)
    rank, world = dist.get_rank(), dist.get_world_size()
    part = slice(rank, None, world)
    totals = torch.tensor([0.0, 0.0], dtype=torch.float64)
    totals[0] = ((model(test.inputs[part]) - test.targets[part]) ** 2).sum()
    totals[1] = len(test.inputs[part])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def results_file(name: str) -> IO[str]:
    """A file of results, open for appending."""
    folder = Path("results")
    folder.mkdir(exist_ok=True)
    return (folder / name).open("a")


def append(name: str, line: str) -> None:
    """Append a line to a file of results."""
    with results_file(name) as file:
        file.write(line + "\n")
