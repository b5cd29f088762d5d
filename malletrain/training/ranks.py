"""Which rank this process is.

Decides where that is looked up. It starts nothing and imports no torch by itself.
"""

from __future__ import annotations

import os
import sys

from malletrain.protocol import env


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) from torch.distributed when it is initialised, else from the environment
    torchrun sets, else (0, 1).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def leads_its_node() -> bool:
    """Whether this process is the first of its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def nodes() -> int:
    """How many nodes the ranks are on, all with as many."""
    try:
        return max(1, rank_and_world()[1] // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except (ValueError, ZeroDivisionError):
        return 1


def max_world(world_size: int) -> int:
    """The largest number of ranks the job may ever have, as the agent says; ``world_size``, that
    of now, outside MalleTrain.
    """
    try:
        return max(world_size, int(os.environ.get(env.MAX_WORLD_SIZE, "1")))
    except ValueError:
        return world_size
