"""Training of one cell as a malleable job: an ordinary torchrun script, whose validation accuracy
after each epoch is what a sweep judges by.

The batch is the global one, so that the result does not depend on the number of workers, but for
rounding and for the batch normalisation, which sees each worker's share.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import malletrain
from nas import NasError
from nas.codes import decode, text
from nas.images import subsets
from nas.network import CellNetwork
from nas.sizes import PRESETS, size_of


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the network of one cell.")
    parser.add_argument("--edges", type=int, required=True, help="the cell's edges as a number")
    parser.add_argument("--ops", type=int, required=True, help="its operations as a number")
    parser.add_argument("--data", type=Path, required=True, help="folder with Fashion-MNIST")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--train", type=int, default=4000, help="images to train on")
    parser.add_argument("--validation", type=int, default=2000, help="images to judge by")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=128, help="samples a step, all workers")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot", nargs="?", const=True, help="path; none: a place of its own")
    return parser.parse_args(words)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of ``data`` that is classified rightly, 0..1."""
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in DataLoader(data, batch_size=500):
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / len(data)


def train(args: argparse.Namespace) -> float:
    """Train; the last validation accuracy, on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    cell, size = decode(args.edges, args.ops), PRESETS[args.preset]
    # Cells of like size scale alike: what one trial's profile found, others begin with.
    parameters, flops = size_of(cell, args.preset)
    malletrain.describe(parameters, flops)
    training, validation = subsets(args.data, args.train, args.validation)
    model = CellNetwork(cell, size)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    sampler = malletrain.ElasticSampler(
        len(training), global_batch_size=args.batch_size, seed=args.seed
    )
    loader = DataLoader(training, batch_sampler=sampler)
    snapshot = None
    if args.snapshot:
        path = None if args.snapshot is True else args.snapshot
        snapshot = malletrain.Snapshot(
            path, every_s=30.0, model=model, optimizer=optimizer, sampler=sampler
        )
        snapshot.restore()
    wrapped = DistributedDataParallel(model) if distributed else model
    if rank == 0:
        print(f"cell {text(cell.pruned())}, {parameters} parameters", flush=True)
    score = 0.0
    for epoch in sampler.epochs(args.epochs):
        for group in optimizer.param_groups:  # by the epoch alone, so that no state of it is kept
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(images), labels) * sampler.loss_weight
            loss.backward()
            optimizer.step()
            sampler.advance()
            malletrain.report(len(labels))
            if snapshot:
                snapshot.step()
        if rank == 0:
            score = accuracy(model, validation)
            malletrain.metric("accuracy", score, step=epoch + 1)
            print(f"epoch {epoch + 1}/{args.epochs} accuracy {score:.4f}", flush=True)
    if snapshot:
        snapshot.save()
    if distributed:
        dist.destroy_process_group()
    return score


def main(words: Sequence[str] | None = None) -> None:
    """The script."""
    try:
        train(arguments(words))
    except NasError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
