"""What sampler and stream have in common: epochs that follow each other from a restored position,
and an order that a snapshot began.

Decides when an epoch is over for the training loop. An epoch has two parts: its steps, and the code
that a script runs after them (scheduler, evaluation). Between the last step and the end of that
code the position is the start of the next epoch already, and :attr:`CountedEpochs.between_epochs`
is true: the state of that moment must not be resumed from, because the code would be skipped.
What a position is, and how far a step moves it, is the subclass's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from malletrain.protocol.worker_channel import WorkLeft
from malletrain.training.report import send, tell, training_over


class CountedEpochs:
    """Epochs whose steps the training loop counts by ``advance()``."""

    epoch: int
    seed: int
    shuffle: bool
    rank: int

    _name = ""
    """What scripts call it, for sentences."""
    _ordered = ""
    """What is put in order, and what would come again in another one."""

    def __init__(self) -> None:
        self._advances = 0
        self._ended = False
        self.looping = False
        """The script loops over :meth:`epochs`."""
        self.finished = False
        """All epochs that :meth:`epochs` was asked for are done."""
        self._listeners: list[Callable[[], None]] = []
        self._ahead = 0
        """Batches that the script's loop takes before it needs them, as a prefetcher does."""
        self.between_epochs = False
        """The steps of an epoch are done, and the code that follows them may still be running: from
        the last step until the loop asks for the next epoch.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listeners": []}  # those of this process

    def on_epoch_closed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the code after the steps of an epoch has run, on every rank:
        where :meth:`epochs` goes on or, in scripts without it, where the next epoch is iterated.
        """
        self._listeners.append(listener)

    def close_epoch(self) -> None:
        """The code after the steps of the epoch has run."""
        if not self.between_epochs:
            return
        self.between_epochs = False
        for listener in self._listeners:
            listener()

    def _micro_batch(self, not_done: int) -> int:
        """Which of the batches since the last ``advance()`` the script is at, from 0: more than 0
        where it accumulates gradients. ``not_done``: batches that its loop took and that no
        ``advance()`` has counted.
        """
        return max(0, not_done - 1 - self._ahead)

    def _iterated(self) -> None:
        """The batches of an epoch are asked for. While :meth:`epochs` is in use that closes no
        epoch: a script may also go through its training data after the steps, to evaluate.
        """
        if not self.looping:
            self.close_epoch()

    def epochs(self, count: int) -> Iterator[int]:
        """``for epoch in sampler.epochs(10)``: the epochs not finished yet of 10, starting with the
        one the restored position is in.

        Leaving the inner loop early goes on with the next epoch, as in any script.

        Raises:
            RuntimeError: when an epoch ends without its steps having been counted by ``advance``.
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
            if self.between_epochs:
                self.finished = self.epoch >= count
                self.close_epoch()
                continue
            if self.epoch != epoch:
                continue
            # one that is resumed where the script's limit is has no step left
            if self._advances == advances and not resumed:
                raise RuntimeError(
                    f"Epoch {epoch} ended without a single call of {self._name}.advance(), so that "
                    "no snapshot knows how far it came. "
                    f"Call {self._name}.advance() at the end of each training step, on every rank."
                )
            self._leave_epoch()

    def end(self) -> None:
        """End :meth:`epochs` when the loop asks for the next one; the position stays where it
        is.
        """
        self._ended = True

    def _samples_left(self, count: int) -> int | None:
        """Samples of all ranks to the end of ``count`` epochs; None: nobody knows."""
        return None

    def _is_begun(self) -> bool:
        """Whether steps of the epoch are done."""
        raise NotImplementedError

    def _leave_epoch(self) -> None:
        """The loop has left the epoch early: say so, and go to the next one."""
        raise NotImplementedError

    def _keep_order(self, state: Mapping[str, Any]) -> None:
        """Go on in the order of a snapshot's ``state``: its seed wins."""
        seed, shuffle = int(state["seed"]), bool(state["shuffle"])
        if (seed, shuffle) != (self.seed, self.shuffle):
            tell(
                f"The {self._ordered} order goes on as the snapshot began it (seed {seed}, shuffle "
                f"{shuffle}); the script's (seed {self.seed}, shuffle {self.shuffle}) would repeat "
                f"{self._ordered}s."
            )
        self.seed, self.shuffle = seed, shuffle
