"""Learning rates for a global batch that changes with the scale: the linear and the square-root
rule.

With a fixed global batch size (``ElasticSampler(global_batch_size=...)``, the default advice)
neither is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], None]


def lr_linear(optimizer: Any, base_batch: int) -> Rule:
    """A hook for :meth:`Run.on_change`: learning rate ∝ global batch (Goyal et al. 2017, section
    2.1).

    Args:
        optimizer: a torch optimizer; every parameter group keeps its own ratio.
        base_batch: global batch size that the script's learning rate is meant for.
    """
    return _rule(optimizer, base_batch, lambda ratio: ratio)


def lr_sqrt(optimizer: Any, base_batch: int) -> Rule:
    """The same with the square root of the ratio, as for Adam (Malladi et al. 2022)."""
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
            # What a scheduler made of it meanwhile stays: only the ratio to the factor before is
            # applied.
            factor = new_factor / group.get("malletrain_lr_factor", 1.0)
            group["lr"] *= factor
            if "initial_lr" in group:  # what most schedulers compute from
                group["initial_lr"] *= factor
            group["malletrain_lr_factor"] = new_factor

    return change
