"""Learning rate rules for a global batch that changes with the scale: the linear and the
square-root rule.

With a fixed global batch size (``ElasticSampler(global_batch_size=...)``, which is recommended)
neither is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], None]


def lr_linear(optimizer: Any, base_batch: int) -> Rule:
    """Returns a hook for :meth:`Run.on_change`: learning rate ∝ global batch (Goyal et al. 2017,
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
