"""Conditions of a change of the global batch size: all ranks name the same size, and no batch
normalisation gets portions of one sample.

Decides what is refused. :mod:`malletrain.training.sampler` decides when a change takes effect.
torch is imported only if the script has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from malletrain.training.objects import unwrapped


def check_same_size(size: object, world_size: int) -> None:
    """Compare the size that each rank names. Collective, if torch.distributed is initialised and
    has ``world_size`` ranks; otherwise this process cannot know the others, and nothing happens.

    Args:
        size: samples per step over all ranks, as this rank names it.
        world_size: number of ranks that share a global batch.

    Raises:
        ValueError: the ranks name different sizes.
    """
    distributed = sys.modules.get("torch.distributed")
    if (
        world_size == 1
        or distributed is None
        or not distributed.is_available()
        or not distributed.is_initialized()
        or distributed.get_world_size() != world_size
    ):
        return
    sizes: list[Any] = [None] * world_size
    distributed.all_gather_object(sizes, size)
    if any(other != sizes[0] for other in sizes):
        by_rank = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(sizes))
        raise ValueError(
            f"The ranks set different global batch sizes ({by_rank}), so that they would train on "
            "different parts of the data. Compute the size from what all ranks have in common, "
            "such as the epoch or a loss that is averaged over the ranks."
        )


def check_batch_norm(objects: Mapping[str, Any], smallest_share: int) -> None:
    """Check that portions suit the models' layers.

    Args:
        objects: the script's objects, by name; those that are modules are checked.
        smallest_share: samples of the smallest portion of a rank.

    Raises:
        ValueError: portions have one sample, and a layer normalises over a portion. SyncBatchNorm
            normalises over all ranks. A layer in ``eval()`` mode within a model that trains uses
            its running statistics.
    """
    if smallest_share > 1:
        return
    from torch.nn import Module, SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm

    for value in objects.values():
        module = unwrapped(value)
        if not isinstance(module, Module):
            continue
        for name, layer in module.named_modules():
            normalises = isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
            if normalises and (layer.training or not module.training):
                raise ValueError(
                    f"With this global batch size a rank may have one sample of a step, and the "
                    f"batch normalisation {name!r} takes mean and variance of a rank's samples. "
                    "Use a larger size, submit the job with fewer nodes at most, or use "
                    "SyncBatchNorm, GroupNorm or LayerNorm."
                )
