"""Draws the samples of an epoch such that samples with a high loss occur more often, and computes
the expected number of draws of each. Pure.

The scheme is that of SHADE (Khan et al., "SHADE: Enable Fundamental Cacheability for Distributed
Deep Learning Training", FAST 2023). A sample's score is the rank of its loss among those of its
batch: losses of different times cannot be compared, but ranks can. Its weight is

    log(10 + rank),   rank from 0 to (batch size − 1)

plus a term that all samples share and that follows the mean loss: after the first epoch it is one
hundredth of the mean loss, and after each further epoch it is multiplied by exp((new − old) / old).

Decides the draws of an epoch, as many as there are samples:

* a sample without a score is drawn once;
* the samples are divided into ``revisit`` parts, and each epoch draws every sample of one part
  once, so that ``revisit`` epochs reach all samples;
* the other *d* draws follow the weights. A sample that has the share *q* of all weights is drawn
  *d · q* times, rounded up or down at random (systematic sampling): the mean number is exact, and
  the number hardly varies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from malletrain.training.epoch_plan import order

RANK_OFFSET = 10.0
"""Added to a rank before the logarithm: the last rank of a batch of 128 has 2.1 times the weight of
the first.
"""
FIRST_SMOOTHING = 0.01
"""Term that all weights share after the first epoch, relative to its mean loss."""
LEVELS = 15
"""Number of levels in which a rank is stored; 0 means that the sample has no score."""
_SCALE = 1 << 20
"""Weights are whole numbers of this fraction, so that all processes have equal sums."""
_GROUPS, _DRAWS, _SHUFFLE = 1, 2, 3
"""What a permutation is for: each purpose has permutations of its own."""


@dataclass(frozen=True)
class Importance:
    """The scores of all samples. An epoch draws by the scores at its beginning; the losses that it
    observes change the scores of the next epoch.
    """

    levels: Any
    """Level of each sample at the beginning of the epoch, 0 to LEVELS: a tensor of bytes."""
    newest: Any
    """Level of each sample after its newest training: a tensor of bytes, changed in place."""
    batch: int
    """Number of ranks among which weights are spread: the global batch size at the beginning."""
    smoothing: float = 0.0
    """Term that all weights share."""
    last_loss: float | None = None
    """Mean loss of the epoch before; None if there is none."""
    loss_sum: float = 0.0
    """Sum of the losses of this epoch so far."""
    loss_count: int = 0
    """Number of these losses."""

    @classmethod
    def unseen(cls, num_samples: int, batch: int) -> Importance:
        """Return the scores before the first epoch."""
        import torch

        levels = torch.zeros(num_samples, dtype=torch.uint8)
        return cls(levels, levels.clone(), batch)

    def trained(self, samples: Any, losses: Any) -> Importance:
        """Return the scores after one global batch.

        Args:
            samples: indices of its samples; a tensor.
            losses: loss of each; a tensor. Samples whose loss is not finite keep their score.
        """
        import torch

        finite = torch.isfinite(losses)
        samples, losses = samples[finite], losses[finite].double()
        if not len(losses):
            return self
        self.newest[samples] = levels_of(losses)
        return replace(
            self,
            loss_sum=self.loss_sum + math.fsum(losses.tolist()),
            loss_count=self.loss_count + len(losses),
        )

    def next_epoch(self) -> Importance:
        """Return the scores at the beginning of the next epoch."""
        smoothing, last_loss = self.smoothing, self.last_loss
        if self.loss_count:
            mean = self.loss_sum / self.loss_count
            if last_loss is None:
                smoothing = FIRST_SMOOTHING * max(0.0, mean)
            elif last_loss > 0:
                smoothing *= math.exp(min(1.0, (mean - last_loss) / last_loss))
            last_loss = mean
        return Importance(self.newest.clone(), self.newest, self.batch, smoothing, last_loss)

    def weights(self) -> Any:
        """Return the weight of each sample in draws, as whole numbers; 0 for samples without a
        score.
        """
        import torch

        of_level = [0.0] + [
            math.log(RANK_OFFSET + (level - 1) / (LEVELS - 1) * (self.batch - 1)) + self.smoothing
            for level in range(1, LEVELS + 1)
        ]
        table = torch.tensor([round(weight * _SCALE) for weight in of_level])
        return table[self.levels.long()]

    def state(self) -> dict[str, Any]:
        """Return everything as plain values: one byte for each sample, and a few numbers."""
        return {
            "levels": self.levels * 16 + self.newest,
            "batch": self.batch,
            "smoothing": self.smoothing,
            "last_loss": self.last_loss,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Importance:
        """Return the scores of :meth:`state`.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        both, last_loss = state["levels"].cpu(), state["last_loss"]
        return cls(
            both // 16,
            both % 16,
            int(state["batch"]),
            float(state["smoothing"]),
            None if last_loss is None else float(last_loss),
            float(state["loss_sum"]),
            int(state["loss_count"]),
        )


def levels_of(losses: Any) -> Any:
    """Return the level of each loss among ``losses``, as a tensor of bytes. The largest loss has
    the level LEVELS; equal losses have equal levels.
    """
    import torch

    _, index, counts = torch.unique(losses, return_inverse=True, return_counts=True)
    above = torch.cumsum(counts, 0)
    ranks = (above - counts + above - 1).double() / 2  # the mean rank of those that are equal
    most = max(1, len(losses) - 1)
    levels = 1 + torch.round(ranks * (LEVELS - 1) / most)
    if len(losses) == 1:
        levels = torch.full_like(levels, (1 + LEVELS) // 2)
    return levels.to(torch.uint8)[index]


@dataclass(frozen=True)
class EpochDraws:
    """The draws of one epoch."""

    samples: Any
    """Indices of the samples in the order in which they are trained on, with repetitions; a
    tensor.
    """
    expected: Any
    """Expected number of draws of each sample, over all possible draws: a tensor of doubles."""


def epoch_draws(importance: Importance, seed: int, epoch: int, revisit: int) -> EpochDraws:
    """Return the draws of an epoch. They follow from the arguments alone.

    Args:
        importance: the scores at its beginning.
        seed: seed of the run.
        epoch: its number, from 0.
        revisit: number of epochs in which each sample is drawn at least once.
    """
    import torch

    count = len(importance.levels)
    weights = importance.weights()
    unseen = weights == 0
    unseen_count = int(unseen.sum())
    if unseen_count == count:  # the order of an ElasticSampler
        return EpochDraws(order(count, seed, epoch), torch.ones(count, dtype=torch.float64))
    begin, end = (count * part // revisit for part in (epoch % revisit, epoch % revisit + 1))
    due = unseen.clone()
    due[_permutation(count, seed, 0, _GROUPS)[begin:end]] = True
    certain = torch.nonzero(due).reshape(-1)
    draws = count - len(certain)
    mixed = _permutation(count, seed, epoch, _DRAWS)
    sums = torch.cumsum(weights[mixed], 0)
    total = int(sums[-1])
    points = (torch.arange(draws, dtype=torch.float64) + _fraction(seed, epoch)) * (
        total / max(1, draws)
    )
    drawn = mixed[torch.searchsorted(sums, points.long().clamp(max=total - 1), right=True)]
    samples = torch.cat([certain, drawn])[_permutation(count, seed, epoch, _SHUFFLE)]
    part = (end - begin) / count
    by_weight = (count - unseen_count) * (1 - part)
    expected = part + by_weight * (weights.double() / total)
    expected[unseen] = 1.0
    return EpochDraws(samples, expected)


def _permutation(count: int, seed: int, epoch: int, purpose: int) -> Any:
    return order(count, seed * 4 + purpose, epoch)


def _fraction(seed: int, epoch: int) -> float:
    """Return a number from 0 to 1 that is uniform over (seed, epoch)."""
    return (int(order(1 << 12, seed * 4, epoch)[0]) + 0.5) / (1 << 12)
