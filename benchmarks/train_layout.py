"""The training that :mod:`benchmarks.layout` runs in many layouts of a node: one of three models on
CPUs, with a global batch, snapshots and a DataLoader that names no number of workers.

    train_layout.py MODEL DATA REPEAT

``perceptron``: a perceptron of three layers on vectors that need no preparation. ``convolution``: a
small convolutional network on Fashion-MNIST or random images of its size, each shifted and
normalised by the data set. ``unet``: WindSR's denoiser in its size for CPUs. DATA: folder of
Fashion-MNIST, or ``-`` for random images. REPEAT is not used: it makes jobs that share nothing.
Rank 0 writes the time and the number of samples of each step into ``steps-JOB-ROUND``.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import malletrain


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of 28 × 28 pixels, prepared one by one as a data set of files is."""

    def __init__(self, folder: str) -> None:
        if folder == "-":
            generator = torch.Generator().manual_seed(1)
            self.images = torch.randint(
                0, 256, (10_000, 28, 28), dtype=torch.uint8, generator=generator
            )
            return
        with gzip.open(Path(folder) / "train-images-idx3-ubyte.gz") as file:
            data = bytearray(file.read()[16:])
        self.images = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, 28, 28)[:10_000]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].float().div(255.0)
        image = torch.roll(image, (index % 5 - 2, index % 3 - 1), (0, 1))
        return (image - image.mean()).div(image.std() + 1e-3)[None], index % 10


def perceptron(folder: str) -> tuple[nn.Module, Any, int]:
    data = TensorDataset(torch.randn(8192, 784), torch.randint(0, 10, (8192,)))
    layers = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(1024, 10)), data, 256


def convolution(folder: str) -> tuple[nn.Module, Any, int]:
    layers = (
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )
    return nn.Sequential(*layers), Images(folder), 128


class Denoising(nn.Module):
    """WindSR's denoiser with its loss."""

    def __init__(self) -> None:
        super().__init__()
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobscripts" / "windsr"))
        from windsr.networks import Denoiser
        from windsr.presets import preset_of

        self.net = Denoiser(preset_of("cpu"), 2)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        level = torch.full((len(fields),), 500)
        predicted: torch.Tensor = self.net(fields[:, :1], fields[:, 1:], level)
        return predicted


def unet(folder: str) -> tuple[nn.Module, Any, int]:
    return Denoising(), TensorDataset(torch.randn(256, 3, 96, 96), torch.zeros(256)), 8


MODELS = {"perceptron": perceptron, "convolution": convolution, "unet": unet}


def main() -> None:
    """Train until the file ``enough`` exists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("data", help="folder of Fashion-MNIST, or - for random images")
    parser.add_argument("repeat", help="not used: it makes jobs that share nothing")
    arguments = parser.parse_args()
    name, folder = arguments.model, arguments.data
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model, data, batch_size = MODELS[name](folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = malletrain.ElasticSampler(len(data), global_batch_size=batch_size)
    snapshot = malletrain.Snapshot(model=model, optimizer=optimizer, sampler=sampler, every_s=600)
    snapshot.restore()
    net = nn.parallel.DistributedDataParallel(model)
    loss_of = nn.functional.mse_loss if name == "unet" else nn.functional.cross_entropy
    job, generation = os.environ["MALLETRAIN_JOB"], os.environ["MALLETRAIN_GENERATION"]
    stop, samples = torch.zeros(1), 0
    with open(f"steps-{job}-{generation}" if rank == 0 else os.devnull, "w", buffering=1) as file:
        for _ in sampler.epochs(1_000_000):
            for inputs, targets in DataLoader(data, batch_sampler=sampler):
                optimizer.zero_grad()
                outputs = net(inputs)
                answers = inputs[:, :1] if name == "unet" else targets
                (loss_of(outputs, answers) * sampler.loss_weight).backward()
                optimizer.step()
                sampler.advance()
                malletrain.report(len(inputs))
                snapshot.step()
                samples += batch_size
                file.write(f"{time.monotonic()} {samples}\n")
                stop.fill_(os.path.exists("enough"))
                dist.all_reduce(stop)
                if stop.item():
                    return


if __name__ == "__main__":
    main()
