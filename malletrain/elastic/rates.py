"""Learning rates when the scale changes: rules for a global batch that changes with it, and the
check that all ranks made their last update at the same rate.

:func:`lr_linear` and :func:`lr_sqrt` are the linear and the square-root rule. With a fixed global
batch size (``ElasticSampler(global_batch_size=...)``, which is recommended) neither is needed.

The check: if a script computes the rate from a counter of its own, the counter starts at its first
value in a process that joins, and the models of the ranks diverge. :func:`rate_of` decides what is
compared, :func:`sentence` the error message. The comparison is part of the collective that all
ranks call once per step anyway (:mod:`malletrain.elastic.group`). Rates that are tensors on a GPU
are not read, because that would wait for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

Rule = Callable[[Any], None]


def lr_linear(optimizer: Any, base_batch: int) -> Rule:
    """Return a hook for :meth:`Run.on_change`: learning rate ∝ global batch (Goyal et al. 2017,
    section 2.1).

    Args:
        optimizer: a torch optimizer. The rates of its parameter groups keep their ratios.
        base_batch: global batch size for which the script's learning rate is meant.
    """
    return _rule(optimizer, base_batch, lambda ratio: ratio)


def lr_sqrt(optimizer: Any, base_batch: int) -> Rule:
    """As :func:`lr_linear`, with the square root of the ratio; for Adam (Malladi et al. 2022)."""
    return _rule(optimizer, base_batch, math.sqrt)


def _rule(optimizer: Any, base_batch: int, law: Callable[[float], float]) -> Rule:
    if base_batch < 1:
        raise ValueError(
            "base_batch is the global batch size the learning rate is meant for, from 1, not "
            f"{base_batch}."
        )

    def change(run: Any) -> None:
        new_factor = law(run.global_batch / base_batch)
        for group in optimizer.param_groups:
            # Only the ratio of the new factor to the old one is applied, so that changes by a
            # scheduler in between are kept.
            factor = new_factor / group.get("malletrain_lr_factor", 1.0)
            group["lr"] *= factor
            if "initial_lr" in group:  # most schedulers compute the rate from it
                group["initial_lr"] *= factor
            group["malletrain_lr_factor"] = new_factor

    return change


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
    """Return one number that depends on all rates of an update. ``before``: the number of the
    update before it in the same step.
    """
    for factor, number in enumerate(_numbers(optimizer), 1):
        before += number * factor
    return before


def both(rate: float) -> tuple[float, float]:
    """Return what a rank contributes to a maximum over all ranks: its rate, and the negated rate
    from which the maximum gives the lowest.
    """
    return (UNKNOWN, UNKNOWN) if rate == UNKNOWN else (rate, -rate)


def differ(highest: float, negated_lowest: float) -> bool:
    """Return whether the rates of the ranks differ, given the maxima of :func:`both`."""
    return highest != UNKNOWN and highest + negated_lowest > _RELATIVE_TOLERANCE * abs(highest)


def sentence(optimizers: list[torch.optim.Optimizer], rank: int) -> str:
    """Return the error message for the author of the script."""
    rates = ", ".join(
        f"{float(g['lr']):g}" for o in optimizers for g in o.param_groups if "lr" in g
    )
    return (
        f"The ranks made their last update at different learning rates (rank {rank}: {rates} now), "
        "so that their models now differ. A counter of the script's own starts at its first value "
        "in a process that joins: compute the rate from run.steps_done, keep the counter in a "
        "dict that you pass to elastic.Run, and pass the scheduler to elastic.Run."
    )
