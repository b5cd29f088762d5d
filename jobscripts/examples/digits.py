"""Train a small network on scikit-learn's handwritten digits: an ordinary torchrun script (DDP,
gloo) that MalleTrain can rescale.

The 1,797 images of 8x8 pixels ship with scikit-learn, so nothing is downloaded. Runs anywhere:

    malletrain submit --nodes 1:4 digits.py --snapshot
    torchrun --nproc-per-node 2 digits.py --snapshot
    python digits.py

The batch size is the global one, therefore the result does not depend on the number of workers, but
for rounding. Lines that concern MalleTrain are marked with "malletrain".
"""

from __future__ import annotations

import argparse
import gzip
import os
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import malletrain

TEST_SAMPLES = 360


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """(train, test): images as float32 [n, 64] in 0..1, labels as int64 [n]; the same split in
    every run.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise SystemExit("This example trains on scikit-learn's digits: pip install scikit-learn")
    # The file itself, because importing sklearn.datasets takes longer than a rescale should.
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = torch.tensor([[int(float(cell)) for cell in line.split(",")] for line in file])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(7))]
    images, labels = table[:, :64].float() / 16, table[:, 64]
    return (
        TensorDataset(images[TEST_SAMPLES:], labels[TEST_SAMPLES:]),
        TensorDataset(images[:TEST_SAMPLES], labels[:TEST_SAMPLES]),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of ``data`` that the model classifies rightly, 0..1."""
    images, labels = data.tensors
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--batch-size", type=int, default=128, help="samples per step over all workers"
    )
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layers")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument(
        "--evaluate-every",
        type=int,
        default=0,
        metavar="N",
        help="report the accuracy every N epochs, for who watches it grow; 0: at the end only",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--step-delay",
        type=float,
        default=0.0,
        metavar="S",
        help="sleep S seconds in every step, to stretch a demo",
    )
    parser.add_argument(
        "--sample-delay",
        type=float,
        default=0.0,
        metavar="S",
        help="sleep S seconds per sample of this worker's share of a step, so that more workers "
        "are faster although they share one machine",
    )
    parser.add_argument(
        "--snapshot",
        nargs="?",
        const=True,
        metavar="PATH",
        help="keep the state of the run, at PATH or where malletrain.Snapshot() puts it; without "
        "this option a stopped run begins anew",
    )
    parser.add_argument(
        "--snapshot-every", type=float, default=10.0, metavar="S", help="seconds between snapshots"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # the workers of a demo share a few cores
    torch.manual_seed(args.seed)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    train, test = load_digits()

    model: nn.Module = nn.Sequential(
        nn.Linear(64, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = malletrain.ElasticSampler(
        len(train), global_batch_size=args.batch_size, seed=args.seed
    )  # malletrain
    loader = DataLoader(train, batch_sampler=sampler)
    snapshot = None
    if args.snapshot:
        snapshot = malletrain.Snapshot(  # malletrain
            None if args.snapshot is True else args.snapshot,
            every_s=args.snapshot_every,
            model=model,
            optimizer=optimizer,
            sampler=sampler,
        )
        restored = snapshot.restore()  # malletrain
        if restored and rank == 0:
            print(f"restored epoch {sampler.epoch} sample {sampler.position}", flush=True)
    wrapped = DistributedDataParallel(model) if distributed else model
    if rank == 0:
        print(f"training on {sampler.world_size} worker(s)", flush=True)

    for epoch in sampler.epochs(args.epochs):  # malletrain
        loss_sum, started = 0.0, time.monotonic()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(images), labels) * sampler.loss_weight
            loss.backward()
            optimizer.step()
            loss_sum += float(loss.detach())
            time.sleep(args.step_delay + args.sample_delay * len(labels))
            sampler.advance()  # malletrain
            malletrain.report(len(labels))  # malletrain
            if snapshot:
                snapshot.step()  # malletrain
        if rank == 0 and args.evaluate_every and (epoch + 1) % args.evaluate_every == 0:
            malletrain.metric("accuracy", accuracy(model, test), step=epoch + 1)  # malletrain
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs} loss {loss_sum:.3f} in "
                f"{time.monotonic() - started:.1f} s",
                flush=True,
            )

    if snapshot:
        snapshot.save()  # malletrain: a run that is over stays over when it is started again
    if rank == 0:
        result = accuracy(model, test)
        malletrain.metric("accuracy", result)  # malletrain
        print(f"test accuracy {result:.4f}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
