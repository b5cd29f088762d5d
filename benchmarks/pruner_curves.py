"""Learning curves of small networks really trained on Fashion-MNIST, for :mod:`benchmarks.pruners`.

    python -m benchmarks.pruner_curves ../shared/data/fashion_mnist curves.json

Each is a perceptron of one or two hidden layers with a learning rate, a momentum and a batch of its
own, drawn by a seed. The learning rate is divided by ten after 60 % of the epochs, so that a curve
has two stages.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "jobscripts" / "nas"))
from nas.images import subsets

STAGE = 0.6


def drawn(rng: random.Random) -> dict[str, Any]:
    """Hyperparameters of one training."""
    return {
        "lr": 10 ** rng.uniform(-3, 0),
        "momentum": rng.choice((0.0, 0.5, 0.9)),
        "hidden": [2 ** rng.randint(3, 8) for _ in range(rng.randint(1, 2))],
        "batch": rng.choice((32, 64, 128)),
        "dropout": rng.choice((0.0, 0.2, 0.5)),
    }


def curve(tried: dict[str, Any], data: Any, epochs: int, seed: int) -> list[float]:
    """Return the validation accuracy after each epoch."""
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = (part.tensors for part in data)
    images, test_images = images.flatten(1), test_images.flatten(1)
    layers: list[nn.Module] = []
    width = images.shape[1]
    for hidden in tried["hidden"]:
        layers += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(tried["dropout"])]
        width = hidden
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), tried["lr"], tried["momentum"])
    curves = []
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = tried["lr"] * (0.1 if epoch >= STAGE * epochs else 1.0)
        model.train()
        for chosen in torch.randperm(len(images)).split(tried["batch"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        curves.append(float(right))
    return curves


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trainings", type=int, default=120)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = subsets(args.data, 2000, 2000)
    rng = random.Random(args.seed)
    curves = []
    for n in range(args.trainings):
        tried = drawn(rng)
        curves.append({**tried, "accuracy": curve(tried, data, args.epochs, n)})
    args.out.write_text(json.dumps({"epochs": args.epochs, "seed": args.seed, "curves": curves}))
    best = max(curve["accuracy"][-1] for curve in curves)
    print(f"{len(curves)} trainings of {args.epochs} epochs, best {best:.4f}")


if __name__ == "__main__":
    main()
