"""Checks that all ranks made their last update at the same learning rate.

If a script computes the rate from a counter of its own, the counter starts at its first value in a
process that joins, and the models of the ranks diverge. Decides what is compared, and the error
message. The comparison is part of the collective that all ranks call once per step anyway
(:mod:`malletrain.elastic.group`). Rates that are tensors on a GPU are not read, because that would
wait for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

KEYS = ("lr", "weight_decay", "momentum", "betas")
"""The entries of a parameter group that schedulers change."""
UNKNOWN = -math.inf
"""Rate of a rank that has made no update yet; it equals every other."""
_RELATIVE_TOLERANCE = 1e-9
"""Maximum relative difference of equal rates: libraries of different processors round differently.
"""


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[float]:
    for group in optimizer.param_groups:
        for key in KEYS:
            value = group.get(key)
            for number in value if isinstance(value, tuple | list) else (value,):
                if isinstance(number, torch.Tensor) and number.device.type == "cpu":
                    number = number.item()
                if isinstance(number, int | float):
                    yield float(number)


def rate_of(optimizer: torch.optim.Optimizer, before: float = 0.0) -> float:
    """Returns one number that depends on all rates of an update. ``before``: the number of the
    update before it in the same step.
    """
    for factor, number in enumerate(_numbers(optimizer), 1):
        before += number * factor
    return before


def both(rate: float) -> tuple[float, float]:
    """Returns what a rank contributes to a maximum over all ranks: its rate, and the negated rate
    from which the maximum gives the lowest.
    """
    return (UNKNOWN, UNKNOWN) if rate == UNKNOWN else (rate, -rate)


def differ(highest: float, negated_lowest: float) -> bool:
    """Returns whether the rates of the ranks differ, given the maxima of :func:`both`."""
    return highest != UNKNOWN and highest + negated_lowest > _RELATIVE_TOLERANCE * abs(highest)


def sentence(optimizers: list[torch.optim.Optimizer], rank: int) -> str:
    """Returns the error message for the author of the script."""
    here = ", ".join(f"{float(g['lr']):g}" for o in optimizers for g in o.param_groups if "lr" in g)
    return (
        f"The ranks made their last update at different learning rates (rank {rank}: {here} now), "
        "so that their models now differ. A counter of the script's own starts at its first value "
        "in a process that joins: compute the rate from run.steps_done, keep the counter in a "
        "dict that you pass to elastic.Run, and pass the scheduler to elastic.Run."
    )
