"""Whether all ranks made their last update at the same learning rate.

A script that computes the rate from a counter of its own begins at its first value where a process
joins, and the ranks' models drift apart. Decides what is compared, and what is said when it
differs; it travels with the question that all ranks ask each other once a step anyway
(:mod:`malletrain.elastic.group`). Values of updates on a GPU are not looked at: that would wait for
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

KEYS = ("lr", "weight_decay", "momentum", "betas")
"""Of a parameter group: what schedules change."""
UNKNOWN = -math.inf
"""Of who has made no update yet: it is like all others."""
_SAME = 1e-9
"""Relative difference up to which rates are the same: libraries of different processors round
differently.
"""


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[float]:
    for group in optimizer.param_groups:
        for key in KEYS:
            value = group.get(key)
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                    one = one.item()
                if isinstance(one, int | float):
                    yield float(one)


def rate_of(optimizer: torch.optim.Optimizer, before: float = 0.0) -> float:
    """A number that stands for all rates of an update; ``before``: that of the update before it in
    the same step.
    """
    for place, number in enumerate(_numbers(optimizer), 1):
        before += number * place
    return before


def both(rate: float) -> tuple[float, float]:
    """What a rank tells, for a maximum over all ranks."""
    return (UNKNOWN, UNKNOWN) if rate == UNKNOWN else (rate, -rate)


def differ(highest: float, negated_lowest: float) -> bool:
    """Whether ranks differ, by the maxima of what :func:`both` says."""
    return highest != UNKNOWN and highest + negated_lowest > _SAME * abs(highest)


def sentence(optimizers: list[torch.optim.Optimizer], rank: int) -> str:
    """What the script's author is told."""
    here = ", ".join(f"{float(g['lr']):g}" for o in optimizers for g in o.param_groups if "lr" in g)
    return (
        f"The ranks made their last update at different learning rates (rank {rank}: {here} now), "
        "so that their models are not the same any more. A counter of the script's own begins "
        "anew in a process that joins: compute the rate from run.steps_done, keep the counter in a "
        "dict that elastic.Run is given, and pass the scheduler to elastic.Run."
    )
