"""Base class of ElasticSampler and ElasticStream: counts epochs from a restored position, and keeps
the order of the snapshot.

Decides when an epoch ends for the training loop. An epoch has two parts: its steps, and the code
that a script runs after them (scheduler, evaluation). Between the last step and the end of that
code the position is already the start of the next epoch, and :attr:`CountedEpochs.between_epochs`
is true. A run must not resume from a state of that time, because it would skip the code. The
subclass defines what a position is, and how far a step moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from malletrain.protocol.worker_channel import WorkLeft
from malletrain.training.report import send, tell, training_over


class CountedEpochs:
    """Epochs whose steps the training loop counts with ``advance()``."""

    epoch: int
    seed: int
    shuffle: bool
    rank: int

    _name = ""
    """Name of the variable in scripts, for messages."""
    _element_noun = ""
    """Noun for the elements of the order, for messages."""

    def __init__(self) -> None:
        self._advances = 0
        self._ended = False
        self.looping = False
        """True while the script loops over :meth:`epochs`."""
        self.finished = False
        """True if all epochs that were requested from :meth:`epochs` are done."""
        self._listeners: list[Callable[[], None]] = []
        self._meet_before_close: Callable[[], None] | None = None
        self._prefetched = 0
        """Number of batches that the training loop reads ahead, for example with a prefetcher."""
        self.between_epochs = False
        """True from the last step of an epoch until the loop requests the next epoch. Meanwhile the
        code that follows the steps may be running.
        """

    def __getstate__(self) -> dict[str, Any]:
        # listeners belong to this process
        return {**self.__dict__, "_listeners": [], "_meet_before_close": None}

    def on_epoch_closed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on every rank each time the code after the steps of an epoch has run:
        when :meth:`epochs` continues or, in scripts without it, when the next epoch is iterated.
        """
        self._listeners.append(listener)

    def before_epoch_closes(self, meet: Callable[[], None]) -> None:
        """Call ``meet`` on every rank when :meth:`epochs` continues after the code that follows the
        steps of an epoch. If it moves the position back into that epoch, :meth:`epochs` yields the
        epoch again: its last steps are trained once more, and that code runs again.
        """
        self._meet_before_close = meet

    def close_epoch(self) -> None:
        """Call the listeners: the code after the steps of the epoch has run."""
        if not self.between_epochs:
            return
        self.between_epochs = False
        for listener in self._listeners:
            listener()

    def _micro_batch(self, in_progress: int) -> int:
        """Return the index, from 0, of the script's current batch among those since the last
        ``advance()``; above 0 with gradient accumulation. ``in_progress``: number of batches that
        the loop has received and ``advance()`` has not counted.
        """
        return max(0, in_progress - 1 - self._prefetched)

    def _on_iteration(self) -> None:
        """Close the epoch before, because the batches of an epoch are requested. While
        :meth:`epochs` is in use this closes no epoch: a script may also iterate its training data
        after the steps, to evaluate.
        """
        if not self.looping:
            self.close_epoch()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the unfinished epochs, starting with the epoch of the restored
        position: ``for epoch in sampler.epochs(10)``.

        Leaving the inner loop early continues with the next epoch, as in any script.

        Args:
            count: number of epochs of the whole training.

        Raises:
            RuntimeError: an epoch ended, and ``advance`` counted none of its steps.
        """
        remaining = self._samples_left(count)
        if remaining is not None and self.rank == 0:
            send(WorkLeft, samples=float(remaining))
        self.looping, self.finished = True, False
        try:
            yield from self._epochs(count)
        finally:
            self.looping = False
            training_over()

    def _epochs(self, count: int) -> Iterator[int]:
        while self.epoch < count and not self._ended:
            epoch, advances, resumed = self.epoch, self._advances, self._is_begun()
            yield epoch
            if self._ended:
                return
            if self.between_epochs and self._meet_before_close is not None:
                self._meet_before_close()
                if self.epoch == epoch:
                    continue
            if self.between_epochs:
                self.finished = self.epoch >= count
                self.close_epoch()
                continue
            if self.epoch != epoch:
                continue
            # an epoch that is resumed at the script's own limit has no step left
            if self._advances == advances and not resumed:
                raise RuntimeError(
                    f"Epoch {epoch} ended without a single call of {self._name}.advance(), so that "
                    "no snapshot knows how far it came. "
                    f"Call {self._name}.advance() at the end of each training step, on every rank."
                )
            self._abandon_epoch()

    def end(self) -> None:
        """End :meth:`epochs` when the loop requests the next epoch. The position does not
        change.
        """
        self._ended = True

    def _samples_left(self, count: int) -> int | None:
        """Return the number of samples, over all ranks, to the end of ``count`` epochs; None if
        unknown.
        """
        return None

    def _is_begun(self) -> bool:
        """Return whether a step of the epoch is done."""
        raise NotImplementedError

    def _abandon_epoch(self) -> None:
        """Tell the user that the loop has left the epoch early, and move to the next epoch."""
        raise NotImplementedError

    def _keep_order(self, state: Mapping[str, Any]) -> None:
        """Use the order of a snapshot's ``state``. Its seed replaces the script's."""
        seed, shuffle = int(state["seed"]), bool(state["shuffle"])
        if (seed, shuffle) != (self.seed, self.shuffle):
            tell(
                f"The {self._element_noun} order of the snapshot is used "
                f"(seed {seed}, shuffle {shuffle}); the script's (seed {self.seed}, "
                f"shuffle {self.shuffle}) would repeat {self._element_noun}s."
            )
        self.seed, self.shuffle = seed, shuffle
