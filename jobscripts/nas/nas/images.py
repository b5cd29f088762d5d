"""Fashion-MNIST, or whatever lies in the same files: reading, and the subset that trials train on.

Decides which images are for training and which for validation; the test images are nobody's but
the winner's.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from nas import NasError

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def read_idx(path: Path) -> torch.Tensor:
    """The array of unsigned bytes in an IDX file. Raises NasError where it is none."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise NasError(
            f"{path} cannot be read: {error.strerror or error}. Give the folder with Fashion-MNIST "
            "as --data."
        ) from None
    dims = data[3] if len(data) > 4 else 0
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * dims:
        raise NasError(f"{path} is no IDX file of bytes.")
    shape = np.frombuffer(data, ">i4", dims, 4).astype(int)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
    if len(values) != int(np.prod(shape)):
        raise NasError(f"{path} has {len(values)} values where {int(np.prod(shape))} are due.")
    return torch.from_numpy(values.reshape(shape).copy())


def subsets(folder: Path, train: int, validation: int) -> tuple[TensorDataset, TensorDataset]:
    """So many images to train on and, others, to judge by; the same in every trial."""
    images, labels = read_idx(folder / IMAGES), read_idx(folder / LABELS)
    if train + validation > len(images):
        raise NasError(
            f"{folder} has {len(images)} images to train on; {train} and {validation} are more."
        )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(101))

    def part(chosen: torch.Tensor) -> TensorDataset:
        return TensorDataset(images[chosen].float().div(255).unsqueeze(1), labels[chosen].long())

    return part(order[:train]), part(order[train : train + validation])
