"""Which samples of a client are hot, and which samples an epoch reads. Pure.

The heat of a sample is a weighted mean of its loss and its number of uses, each scaled to 0 … 1
over the samples of the client. The hottest samples are kept in memory; the others are read from the
data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


def _scaled(values: Any) -> Any:
    span = values.max() - values.min()
    return np.full(len(values), 0.5) if span == 0 else (values - values.min()) / span


def hot_samples(losses: Any, uses: Any, count: int, loss_weight: float = 0.7) -> list[int]:
    """Return the ``count`` hottest samples in ascending order.

    Args:
        losses: last loss of each sample; NaN: never read. Samples that were never read come after
            all others.
        uses: number of times that each sample was read.
        count: number of samples that fit.
        loss_weight: weight of the loss, 0 to 1; the rest is that of the frequency.
    """
    losses, uses = np.asarray(losses, dtype=float), np.asarray(uses, dtype=float)
    count = min(max(0, count), len(losses))
    if count == 0:
        return []
    finite = ~np.isnan(losses)
    heat = np.full(len(losses), -1.0)
    if finite.any():
        heat[finite] = loss_weight * _scaled(losses[finite]) + (1.0 - loss_weight) * _scaled(
            uses[finite]
        )
    # Stable, so that of equal samples the first ones are hot.
    order = np.argsort(-heat, kind="stable")
    return sorted(int(sample) for sample in order[:count])


@dataclass(frozen=True)
class ClientEpoch:
    """What a client reads in one epoch."""

    samples: list[int]
    """The samples in the order in which they are read."""
    weights: list[float]
    """Weight of each in the loss: 1 / the probability that the epoch reads it. This makes the
    expected gradient that of all samples of the client.
    """


def plan_epoch(samples: int, hot: list[int], cold_share: float, random: Any) -> ClientEpoch:
    """Return the plan of an epoch: all hot samples, and a part of the others.

    Args:
        samples: number of samples of the client.
        hot: the samples in memory; without any, the epoch reads all samples.
        cold_share: part of the other samples that is read, above 0 to 1.
        random: a generator of numpy.

    Raises:
        ValueError: ``cold_share`` is not above 0, or above 1.
    """
    if not 0.0 < cold_share <= 1.0:
        raise ValueError(f"A share of {cold_share:g} of the cold samples is not in 0 < share <= 1.")
    cold = np.setdiff1d(np.arange(samples), np.asarray(hot, dtype=int))
    count = min(len(cold), max(1, round(len(cold) * cold_share))) if hot else len(cold)
    read = random.choice(cold, size=count, replace=False) if count else cold[:0]
    weight = len(cold) / count if count else 0.0
    order = random.permutation(len(hot) + count)
    both = np.concatenate([np.asarray(hot, dtype=int), read])[order]
    weights = np.concatenate([np.ones(len(hot)), np.full(count, weight)])[order]
    return ClientEpoch([int(s) for s in both], [float(w) for w in weights])
