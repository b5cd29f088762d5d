"""The model and the data of a federated training: the interface that you implement, and
Fashion-MNIST as an example.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Arrays = Mapping[str, Any]
"""A model: name → array of numpy."""


class Task(Protocol):
    """A federated training. Its methods run on the nodes, and :meth:`evaluate` at the server."""

    def sample_counts(self) -> Sequence[int]:
        """Return the number of training samples of each client, in the order of their numbers."""

    def initial_arrays(self) -> Arrays:
        """Return the model before the first round, the same each time."""

    def dataset(self, client: int) -> Any:
        """Return the training samples of a client, with ``__len__`` and ``__getitem__``. A sample
        is what :class:`malletrain.DataCache` accepts.
        """

    def train(
        self, arrays: Arrays, samples: Sequence[Any], weights: Sequence[float], random: Any
    ) -> tuple[Arrays, Sequence[float]]:
        """Train one epoch.

        Args:
            arrays: the model.
            samples: the samples of the epoch, in their order.
            weights: weight of each sample in the loss.
            random: a generator of numpy.

        Returns:
            The model after the epoch, and the loss of each sample under the model before it.
        """

    def evaluate(self, arrays: Arrays) -> Mapping[str, float]:
        """Return measures of a model, such as ``{"accuracy": 0.87}``; empty for none."""


def load_task(name: str, options: str = "{}") -> Task:
    """Return the task ``module:factory``, which is called with the options.

    Args:
        name: such as ``fedcase.task:FashionMnist``.
        options: keyword arguments of the factory, a JSON object.

    Raises:
        ValueError: there is no such task, or the options do not suit it.
    """
    module, _, factory = name.partition(":")
    try:
        arguments = json.loads(options)
        task: Task = getattr(importlib.import_module(module), factory)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f'The task "{name}" with the options {options} cannot be made: {error}. A task is '
            "MODULE:FACTORY with a JSON object of the factory's arguments."
        ) from None
    return task


def dirichlet_parts(labels: Any, clients: int, alpha: float, seed: int) -> list[Any]:
    """Divide the samples among clients. For each label, the parts of the clients are drawn from a
    Dirichlet distribution (Hsu, Qi and Brown, 2019, arXiv:1909.06335).

    Args:
        labels: label of each sample.
        clients: number of clients.
        alpha: concentration; the smaller, the fewer labels a client has.
        seed: seed of the draw.

    Returns:
        Indices of samples, at least one for each client.

    Raises:
        ValueError: there are fewer samples than clients.
    """
    labels = np.asarray(labels)
    if len(labels) < clients:
        raise ValueError(f"{len(labels)} samples are too few for {clients} clients.")
    random = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        of_label = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(clients, alpha))
        cuts = (np.cumsum(shares)[:-1] * len(of_label)).astype(int)
        for part, samples in zip(parts, np.split(of_label, cuts), strict=True):
            part.extend(int(sample) for sample in samples)
    for part in parts:
        if not part:  # a sample of the largest one
            part.append(max(parts, key=len).pop())
    return [np.array(sorted(part)) for part in parts]


class Perceptron:
    """A perceptron with one hidden layer, trained by SGD in batches. Without state."""

    def __init__(self, inputs: int, hidden: int, classes: int, rate: float, batch: int) -> None:
        self.sizes = (inputs, hidden, classes)
        self.rate, self.batch = rate, batch

    def initial(self, seed: int) -> dict[str, Any]:
        """Return weights after He et al. (2015, arXiv:1502.01852)."""
        inputs, hidden, classes = self.sizes
        random = np.random.default_rng(seed)

        def layer(rows: int, columns: int) -> Any:
            return random.normal(0, (2 / rows) ** 0.5, (rows, columns)).astype(np.float32)

        return {
            "w1": layer(inputs, hidden),
            "b1": np.zeros(hidden, np.float32),
            "w2": layer(hidden, classes),
            "b2": np.zeros(classes, np.float32),
        }

    def losses(self, arrays: Arrays, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the cross entropy of each sample, nats, and whether its class is the likeliest."""
        _, probabilities = self._forward(arrays, x)
        own = probabilities[np.arange(len(y)), y]
        return -np.log(np.maximum(own, 1e-12)), probabilities.argmax(1) == y

    def epoch(self, arrays: Arrays, x: Any, y: Any, weights: Any) -> dict[str, Any]:
        """Return the model after one pass over the samples in their order."""
        now = {name: np.array(array, dtype=np.float32) for name, array in arrays.items()}
        for start in range(0, len(y), self.batch):
            part = slice(start, start + self.batch)
            xs, ys, ws = x[part], y[part], weights[part]
            hidden, output = self._forward(now, xs)
            output[np.arange(len(ys)), ys] -= 1
            # Divided by the number of samples, not by the sum of their weights: an epoch that reads
            # a part of the samples then changes the model as much as one that reads all.
            output *= (ws / len(ws))[:, None]
            back = (output @ now["w2"].T) * (hidden > 0)
            now["w2"] -= self.rate * (hidden.T @ output)
            now["b2"] -= self.rate * output.sum(0)
            now["w1"] -= self.rate * (xs.T @ back)
            now["b1"] -= self.rate * back.sum(0)
        return now

    @staticmethod
    def _forward(arrays: Arrays, x: Any) -> tuple[Any, Any]:
        hidden = np.maximum(x @ arrays["w1"] + arrays["b1"], 0)
        logits = hidden @ arrays["w2"] + arrays["b2"]
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        return hidden, exponentials / exponentials.sum(1, keepdims=True)


class FashionMnist:
    """Fashion-MNIST (Xiao et al., 2017, arXiv:1708.07747), divided among simulated clients.

    Args:
        folder: folder with the four files of the data set, such as ``train-images-idx3-ubyte.gz``.
        clients: number of clients.
        alpha: concentration of the Dirichlet distribution of the labels.
        seed: seed of the division and of the first model.
        rate: step size of SGD.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        folder: str,
        clients: int = 200,
        alpha: float = 0.3,
        seed: int = 0,
        rate: float = 0.05,
    ) -> None:
        self._train = _read_pair(Path(folder), "train")
        self._test = _read_pair(Path(folder), "t10k")
        self._parts = dirichlet_parts(self._train[1], clients, alpha, seed)
        self._seed = seed
        self._model = Perceptron(784, 128, 10, rate, batch=32)

    def sample_counts(self) -> Sequence[int]:
        """See :class:`Task`."""
        return [len(part) for part in self._parts]

    def initial_arrays(self) -> Arrays:
        """See :class:`Task`."""
        return self._model.initial(self._seed)

    def dataset(self, client: int) -> Any:
        """See :class:`Task`."""
        images, labels = self._train
        return [(images[sample], int(labels[sample])) for sample in self._parts[client]]

    def train(
        self, arrays: Arrays, samples: Sequence[Any], weights: Sequence[float], random: Any
    ) -> tuple[Arrays, Sequence[float]]:
        """See :class:`Task`."""
        x = np.stack([image for image, _ in samples]).reshape(-1, 784).astype(np.float32) / 255
        y = np.array([label for _, label in samples])
        losses, _ = self._model.losses(arrays, x, y)
        return self._model.epoch(arrays, x, y, np.asarray(weights, np.float32)), losses.tolist()

    def evaluate(self, arrays: Arrays) -> Mapping[str, float]:
        """Return the accuracy on the test images, 0 to 1."""
        images, labels = self._test
        _, right = self._model.losses(arrays, images.reshape(-1, 784) / np.float32(255), labels)
        return {"accuracy": float(right.mean())}

    def accuracy_of_clients(self, arrays: Arrays) -> list[float]:
        """Return the accuracy of a model on the training samples of each client, 0 to 1."""
        images, labels = self._train
        _, right = self._model.losses(arrays, images.reshape(-1, 784) / np.float32(255), labels)
        return [float(right[part].mean()) for part in self._parts]


def _read_pair(folder: Path, part: str) -> tuple[Any, Any]:
    images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    return (
        np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28),
        np.frombuffer(labels, np.uint8, offset=8).astype(np.int64),
    )
