"""The same global batch at every number of ranks, for the training loops of other libraries.

Decides how each rank's share of a global batch is divided into micro-batches that fit its device,
and the weight of each. The library accumulates the gradients over them, so that steps, epochs and
schedule are the same at every number of ranks. The library's count of steps decides where in the
data a run resumes.
"""

from __future__ import annotations

from collections.abc import Iterator

from malletrain.training.epoch_plan import EpochPlan, order, piece
from malletrain.training.ranks import max_world, rank_and_world


class ConstantBatch:
    """A batch sampler for ``DataLoader(dataset, batch_sampler=…)`` that yields this rank's
    micro-batches of an epoch.

    Args:
        num_samples: length of the dataset.
        per_device: maximum number of samples of a micro-batch (one more if shares are uneven).
        global_batch_size: number of samples of a step over all ranks. Default: ``per_device *
            accumulate`` times the job's maximum number of ranks.
        accumulate: number of micro-batches of a step at the maximum number of ranks, for that
            default.
        seed: seed of the order.
        shuffle: False yields the samples in order.
        drop_last: drop a remainder smaller than a global batch.

    Raises:
        ValueError: the sizes are inconsistent; the message names them.
    """

    def __init__(
        self,
        num_samples: int,
        per_device: int,
        global_batch_size: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.rank, world = rank_and_world()
        max_ranks = max_world(world)
        size = (
            per_device * accumulate * max_ranks if global_batch_size is None else global_batch_size
        )
        if size < max_ranks:
            raise ValueError(
                f"A global batch of {size} samples cannot be shared by the {max_ranks} ranks the "
                "job may have. Raise global_batch_size or submit the job with fewer nodes at most."
            )
        self.plan = EpochPlan(num_samples, size, world, max_ranks, drop_last)
        self.plan.check_largest(size)
        self.per_device = per_device
        self.accumulate = self._micro_batch_count(size)
        self.steps_per_epoch = self.plan.steps_from(0)
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.resumed = (0, 0)
        """(epoch, step) from which the training resumes; all other epochs start at step 0."""

    @property
    def samples_done(self) -> int:
        """Number of samples before the position at which the next iteration starts."""
        epoch, step = self.resumed
        start = step * self.plan.global_batch_size if epoch == self.epoch else 0
        return self.epoch * self.plan.num_samples + start

    def limit(self, steps: int) -> None:
        """Limit an epoch to ``steps`` steps."""
        self.steps_per_epoch = min(self.plan.steps_from(0), steps)

    def _micro_batch_count(self, batch: int) -> int:
        """Return the number of micro-batches of each rank for a global batch of ``batch`` samples:
        the same on all ranks, and none is empty.
        """
        world = self.plan.world_size
        largest = -(-batch // world)
        return min(-(-largest // self.per_device), batch // world)

    def batch(self, step: int) -> tuple[int, int]:
        """Return (samples of all ranks, micro-batches per rank) of a step of an epoch."""
        size = self.plan.batch_at(step * self.plan.global_batch_size)
        return size, min(self.accumulate, self._micro_batch_count(size))

    def share(self, step: int) -> int:
        """Return the number of samples of this rank in a step of an epoch."""
        return self.plan.share(self.batch(step)[0], self.rank)[1]

    def weight(self, step: int, micro: int) -> float:
        """Return the factor for the mean loss of a micro-batch, so that the average over the ranks
        of the average over their micro-batches is the mean over the global batch; 1 if all
        micro-batches have the same size.
        """
        batch, pieces = self.batch(step)
        own = piece(self.share(step), pieces, micro)[1]
        return own * pieces * self.plan.world_size / batch

    def micro_batches(self, steps: int) -> int:
        """Return the number of micro-batches of the first ``steps`` steps of an epoch, on each
        rank.
        """
        return 0 if steps < 1 else (steps - 1) * self.accumulate + self.batch(steps - 1)[1]

    def __len__(self) -> int:
        """Number of micro-batches of a whole epoch, on each rank."""
        return self.micro_batches(self.steps_per_epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the micro-batches of the epoch, from its first step or the resumed one, as lists of
        sample indices.
        """
        epoch, step = self.resumed
        return self._from(step if epoch == self.epoch else 0)

    def _from(self, step: int) -> Iterator[list[int]]:
        plan = self.plan
        indices = (
            order(plan.num_samples, self.seed, self.epoch).tolist()
            if self.shuffle
            else range(plan.num_samples)
        )
        for number in range(step, self.steps_per_epoch):
            batch, pieces = self.batch(number)
            start, size = plan.share(batch, self.rank)
            start += number * plan.global_batch_size
            for micro in range(pieces):
                first, length = piece(size, pieces, micro)
                yield list(indices[start + first : start + first + length])
