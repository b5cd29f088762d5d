"""``malletrain.ImportanceSampler``: an ElasticSampler that draws samples with a high loss more
often.

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

The scores of a step count when the step is counted, for the draws of the next epoch. They are the
same on all ranks, because the ranks exchange the losses of each step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from malletrain.training.epoch_plan import UpcomingBatch, order, upcoming_batches, whole_number
from malletrain.training.report import tell
from malletrain.training.sampler import ElasticSampler

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
_STATE = "importance"


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


class ImportanceSampler(ElasticSampler):
    """A batch sampler that draws samples with a high loss more often, an experiment::

        losses = cross_entropy(model(images), labels, reduction="none")
        (losses * sampler.weights).mean().backward()
        optimizer.step()
        sampler.advance(losses=losses)

    An epoch has as many draws as there are samples. It uses the scores of its beginning, so that
    each of its draws is trained on exactly once whatever nodes come and go. The first epoch draws
    each sample once. Samples with wrong labels have the highest losses and are drawn most often.

    Args:
        num_samples: length of the dataset.
        global_batch_size: samples per step over all ranks. Exactly one of this and ``batch_size``.
        batch_size: samples per step and rank.
        seed: seed of the draws.
        revisit: number of epochs in which each sample is drawn at least once, from 1. With 1 each
            epoch draws each sample once.
        correct: whether :attr:`weights` makes the mean loss of a batch an unbiased estimate of that
            over all samples. False: all weights are 1, and training prefers samples with a high
            loss.
        rank, world_size, max_world_size: as of :class:`malletrain.ElasticSampler`.

    Raises:
        ValueError: the sizes are inconsistent; the message names them.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        revisit: int = 10,
        correct: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        max_world_size: int | None = None,
    ) -> None:
        whole_number("revisit", revisit, "ImportanceSampler")
        super().__init__(
            num_samples,
            global_batch_size=global_batch_size,
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            max_world_size=max_world_size,
        )
        self.revisit, self.correct = revisit, correct
        self._importance = Importance.unseen(num_samples, self.global_batch_size)
        self._importance_epoch = 0
        """Epoch at whose beginning the scores in use were taken."""
        self._scored: list[tuple[Any, Any]] = []
        """(samples, losses) of the batches of this step, which do not count yet."""
        self._draws: EpochDraws | None = None
        """Draws of this epoch; None until they are needed."""
        self._coverage: tuple[EpochDraws, float] | None = None
        """Draws, and the part of the samples that are in them."""

    # --- what the training loop needs ---

    @property
    def weights(self) -> Any:
        """Weight of each sample of this rank's newest batch, a tensor: 1 / (expected number of its
        draws in this epoch), or 1 with ``correct=False``. The mean of (weight · loss) over a global
        batch estimates the mean loss over all samples. Read it before :meth:`advance`.
        """
        import torch

        position, batch = self._batch_in_progress()
        start, size = self._plan.share(batch, self.rank)
        if not self.correct:
            return torch.ones(size)
        draws = self._epoch_draws()
        samples = draws.samples[position + start : position + start + size]
        return (1.0 / draws.expected[samples]).float()

    def score(self, losses: Any, batches: int = 1) -> None:
        """Give the losses of the current step. They count when the step does: at :meth:`advance`,
        which live mode calls itself at the end of ``with run.step():``. Collective: call it on
        every rank, within the step and before ``optimizer.step()`` in live mode.

        Args:
            losses: loss of each sample of this rank, without :attr:`weights`: a tensor, in the
                order of the batch. With several batches one after another.
            batches: number of batches of the step.

        Raises:
            ValueError: there are more or fewer losses than this rank has samples.
            RuntimeError: there are several ranks, and torch.distributed is not initialized.
        """
        import torch

        sizes: list[int] = []
        positions: list[int] = []
        position = self.position
        while len(sizes) < batches and (batch := self._plan.batch_at(position)):
            sizes.append(batch)
            positions.append(position)
            position += batch
        shares = [
            [self._plan.share(batch, rank)[1] for batch in sizes] for rank in range(self.world_size)
        ]
        own = torch.as_tensor(losses).detach().reshape(-1).float().cpu()
        if len(own) != sum(shares[self.rank]):
            raise ValueError(
                f"The step has {sum(shares[self.rank])} samples on this rank, but {len(own)} "
                'losses were given. Pass the loss of each sample, as with reduction="none".'
            )
        by_rank = losses_of_ranks(own, [sum(each) for each in shares], self.rank)
        pieces = [
            each.split(share) if share else () for each, share in zip(by_rank, shares, strict=True)
        ]
        samples = self._epoch_draws().samples
        self._scored = [
            (samples[at : at + size], torch.cat([of_rank[number] for of_rank in pieces]))
            for number, (at, size) in enumerate(zip(positions, sizes, strict=True))
        ]
        self._tell_not_finite()

    def advance(self, batches: int = 1, *, losses: Any = None) -> None:
        """Move the position past the global batch of the finished step, as
        :meth:`malletrain.ElasticSampler.advance` does.

        Args:
            batches: number of batches that the step took from the loader.
            losses: as for :meth:`score`; None if that was called, or to keep the scores.

        Raises:
            ValueError: there are more or fewer losses than this rank has samples.
            RuntimeError: ``batches`` exceeds the number of batches that are not counted yet, or
                there are several ranks and torch.distributed is not initialized.
        """
        if losses is not None:
            self.score(losses, batches)
        for samples, values in self._scored:
            self._importance = self._importance.trained(samples, values)
        self._scored = []
        super().advance(batches)

    def _tell_not_finite(self) -> None:
        import torch

        wrong = [samples[~torch.isfinite(losses)] for samples, losses in self._scored]
        numbers = torch.cat(wrong).tolist() if wrong else []
        if numbers and self.rank == 0:
            tell(
                f"The loss of sample {numbers[0]} is not a finite number (and of "
                f"{len(numbers) - 1} others of the same step). Such samples keep their score. Look "
                "for a learning rate that is too high, or for damaged data.",
                once="losses that are not finite",
            )

    # --- the order ---

    def _epoch_draws(self) -> EpochDraws:
        if self._draws is None:
            self._draws = epoch_draws(self._importance, self.seed, self.epoch, self.revisit)
        return self._draws

    def _indices(self, epoch: int) -> Any:
        if epoch != self.epoch:
            raise ValueError(
                f"ImportanceSampler: the draws of epoch {epoch} are not known in epoch "
                f"{self.epoch}, because they depend on losses. Ask for those of the present epoch."
            )
        return self._epoch_draws().samples

    def unread_batches(self, count: int) -> list[UpcomingBatch]:
        """Return the next ``count`` batches of this rank that were not requested yet; fewer at the
        end of the epoch, because the draws of the next one depend on the losses of this one.
        """
        epoch, position = max(self._read_up_to, (self.epoch, self.position))
        if epoch != self.epoch:
            return []
        count = min(count, self._plan.steps_from(position))
        return upcoming_batches(self._plan, self._indices, self.rank, epoch, position, count)

    @property
    def coverage(self) -> float:
        """Part of the samples that this epoch trains on."""
        draws = self._epoch_draws()
        if self._coverage is None or self._coverage[0] is not draws:
            self._coverage = draws, len(draws.samples.unique()) / self.num_samples
        return self._coverage[1]

    def resize(self, rank: int, world_size: int) -> None:
        """See :meth:`malletrain.ElasticSampler.resize`. Losses that were given for a step that does
        not count are dropped.
        """
        super().resize(rank, world_size)
        self._scored = []

    def _roll_over(self) -> bool:
        over = super()._roll_over()
        self._begin_epoch()
        return over

    def _begin_epoch(self) -> None:
        """Use the newest scores if the epoch is another one."""
        if self.epoch == self._importance_epoch:
            return
        if not self._importance.loss_count and self.rank == 0:
            tell(
                "ImportanceSampler got no losses in a whole epoch, so that all samples are drawn "
                "as before. Call sampler.advance(losses=losses).",
                once="no losses",
            )
        self._importance = self._importance.next_epoch()
        self._importance_epoch, self._draws, self._scored = self.epoch, None, []

    def set_position(self, epoch: int, position: int) -> None:
        """See :meth:`malletrain.ElasticSampler.set_position`.

        Raises:
            ValueError: the epoch is negative or has no such sample, or is an earlier one, whose
                scores are gone.
        """
        if 0 <= epoch < self._importance_epoch:
            raise ValueError(
                f"ImportanceSampler: epoch {epoch} cannot be trained on again in epoch "
                f"{self._importance_epoch}, because the scores of its beginning are gone. Restore "
                "a snapshot of that epoch."
            )
        super().set_position(epoch, position)

    # --- what a snapshot needs ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the scores, one byte for each sample; they are the same on every
        rank.
        """
        importance = self._importance.next_epoch() if self.left_early else self._importance
        return {**super().state_dict(), _STATE: importance.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, or from one of an ElasticSampler.

        Raises:
            ValueError: the state has another version, belongs to a dataset of another length, or is
                damaged.
        """
        importance = Importance.unseen(self.num_samples, self.global_batch_size)
        if (scores := state.get(_STATE)) is not None:
            try:
                importance = Importance.of_state(scores)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"The sampler's state has damaged scores: {error}.") from error
            if len(importance.levels) != self.num_samples:
                raise ValueError(
                    f"The sampler's state has scores of {len(importance.levels)} samples, but this "
                    f"dataset has {self.num_samples}. Train with the same data, or start anew with "
                    "another snapshot path."
                )
        before = self._importance, self._importance_epoch
        self._importance, self._importance_epoch = importance, int(state.get("epoch", 0))
        self._draws, self._scored = None, []
        try:
            super().load_state_dict(state)
        except ValueError:
            self._importance, self._importance_epoch = before
            raise
        finally:
            self._draws = None  # those of the state's seed


def losses_of_ranks(own: Any, sizes: Sequence[int], rank: int) -> list[Any]:
    """Return the losses of all ranks. Collective.

    Args:
        own: losses of this rank, a tensor on the CPU.
        sizes: number of losses of each rank.
        rank: this rank.

    Raises:
        RuntimeError: there are several ranks, and torch.distributed is not initialized.
    """
    if len(sizes) == 1:
        return [own]
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise RuntimeError(
            f"ImportanceSampler is rank {rank} of {len(sizes)}, but torch.distributed is not "
            "initialized, so that the ranks cannot exchange their losses. Call "
            "torch.distributed.init_process_group() before the training."
        )
    import torch

    # the current GPU need not be the one on which this process trains
    backend = distributed.get_backend()
    device = "cuda" if "nccl" in backend and "cpu:" not in backend else "cpu"
    padded = torch.zeros(max(sizes), device=device)
    padded[: len(own)] = own.to(device)
    gathered = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(gathered, padded)
    return [each[:size].cpu() for each, size in zip(gathered, sizes, strict=True)]
