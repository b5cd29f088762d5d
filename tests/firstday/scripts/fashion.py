"""My first convolutional network, on pictures of 16x16 pixels. After docs/training-scripts.md.

Smooth throughout: where ReLU has its kink, rounding decides, which differs from processor to
processor and with the size of a batch. On one of them two undisturbed runs, on one rank and on two,
ended 3 % apart.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from pace import crawl
from torch import nn
from torch.nn.functional import gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import malletrain

CLASSES, SAMPLES = 4, 250


class Pictures(Dataset):
    """Each class has a pattern of its own below the noise."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.randn(CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 1, 16, 16, generator=generator)
        self.images = 0.5 * patterns[self.labels] + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index], index


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return gelu(x + self.second(gelu(self.norm(self.first(x)))))


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--record", default="record.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")

    train, test = Pictures(SAMPLES, 1), Pictures(200, 2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = malletrain.ElasticSampler(len(train), global_batch_size=args.batch)
    loader = DataLoader(train, batch_sampler=sampler)
    snapshot = malletrain.Snapshot(model=model, optimizer=optimizer, sampler=sampler)
    snapshot.restore()
    ddp = DistributedDataParallel(model) if distributed else model

    loss = torch.tensor(0.0)
    for epoch in sampler.epochs(args.epochs):
        for images, labels, indices in loader:
            crawl()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images), labels) * sampler.loss_weight
            loss.backward()
            optimizer.step()
            line = {"epoch": epoch, "ranks": sampler.world_size, "samples": indices.tolist()}
            with open(args.record, "a") as record:
                record.write(json.dumps(line) + "\n")
            sampler.advance()
            malletrain.report(len(labels))
            snapshot.step()
        if sampler.rank == 0:
            print(f"epoch {epoch + 1} of {args.epochs} done", flush=True)

    snapshot.save()
    if sampler.rank == 0:
        model.eval()
        with torch.no_grad():
            logits = model(test.images)
        accuracy = float((logits.argmax(1) == test.labels).float().mean())
        malletrain.metric("accuracy", accuracy)
        loss = float(nn.functional.cross_entropy(logits, test.labels))
        print(f"final accuracy {accuracy:.4f} loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
