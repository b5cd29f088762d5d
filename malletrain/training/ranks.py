"""Looks up the rank of this process. Starts nothing, and does not import torch itself."""

from __future__ import annotations

import os
import sys

from malletrain.protocol import env


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size) from torch.distributed if it is initialised, else from torchrun's
    environment variables, else (0, 1).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def leads_its_node() -> bool:
    """Return whether this process has local rank 0 on its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def nodes() -> int:
    """Return the number of nodes, assuming that all have the same number of ranks."""
    try:
        return max(1, rank_and_world()[1] // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except (ValueError, ZeroDivisionError):
        return 1


def max_world(world_size: int | None = None, global_batch_size: int | None = None) -> int:
    """Return the job's maximum number of ranks, as set by the agent; outside MalleTrain
    ``world_size``.

    Args:
        world_size: current number of ranks. Default: that of :func:`rank_and_world`.
        global_batch_size: samples per step over all ranks; None if each rank has a batch of its
            own. MalleTrain may measure which number of processes of a node is best
            (``--nproc-per-node auto``). It then adds ranks up to this number of samples, and none
            if each rank has a batch of its own.
    """
    current = rank_and_world()[1] if world_size is None else world_size
    try:
        most = max(current, int(os.environ.get(env.MAX_WORLD_SIZE, "1")))
        max_world_of_measured_layouts = int(os.environ.get(env.MAX_WORLD_SIZE_OF_LAYOUTS, "0"))
    except ValueError:
        return current
    return max(most, min(max_world_of_measured_layouts, global_batch_size or 0))
