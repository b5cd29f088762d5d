"""Decides when an epoch of the training loop ends: the base class of ElasticSampler and
ElasticStream. Counts epochs from a restored position, keeps the order of the snapshot, and notifies
listeners.

An epoch has two parts: its steps, and the code that a script runs after them (scheduler,
evaluation). Between the last step and the end of that code the position is already the start of the
next epoch, and :attr:`CountedEpochs.between_epochs` is true. A run must not resume from a state of
that time, because it would skip the code. The subclass defines what a position is, and how far a
step moves it.

A loop may also leave the batches of an epoch early, by ``break``. Whether it does is known when it
requests the next batch, or when the iterator of the batches is freed. From then on the position
counts as the start of the next epoch, as after the last step, unless the loop iterates again.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from malletrain.protocol import env
from malletrain.protocol.worker_channel import WorkLeft
from malletrain.training.report import notice, send, tell, training_over
from malletrain.training.resumed_epoch import Iteration, ResumedEpoch


class LoopListener(Protocol):
    """Is notified of how the training loop gets its batches. Each call names the epochs."""

    def batch_requested(self, epochs: CountedEpochs) -> None:
        """The loop requests a batch, or begins the next epoch."""

    def batches_left(self, epochs: CountedEpochs) -> None:
        """The loop has left the batches of an epoch after one of its steps."""

    def batches_resumed(self, epochs: CountedEpochs) -> None:
        """The loop iterates the batches of that epoch again."""


class BeginListener(Protocol):
    """Is notified of when the code at the beginning of an epoch runs."""

    def epoch_begins(self, epochs: CountedEpochs, begun: bool) -> None:
        """The script is about to run that code. ``begun``: whether a step of the epoch is done."""

    def batches_begin(self, epochs: CountedEpochs) -> None:
        """The script iterates the batches of the epoch."""


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
        self._watchers: list[LoopListener] = []
        self._begin_watchers: list[BeginListener] = []
        self._iteration = Iteration()
        self._resumed_epoch = ResumedEpoch(self._name, self._element_noun)
        self._stale = ""
        """Why the batches of this iteration are not those of the position; empty if they are."""
        self._requesting_thread: int | None = None
        """Thread of the newest request; None if requests are not seen."""
        self.left_early = False
        """True from the moment at which the loop leaves the batches of an epoch early, until it
        requests the next epoch. :attr:`between_epochs` is then true.
        """
        self._looks_at_exit = False
        self._prefetched = 0
        """Number of batches that the training loop reads ahead, for example with a prefetcher."""
        self.between_epochs = False
        """True from the last step of an epoch until the loop requests the next epoch. Meanwhile the
        code that follows the steps may be running.
        """

    def __getstate__(self) -> dict[str, Any]:
        # Listeners belong to this process. Renaming an attribute breaks samplers that are pickled.
        own: dict[str, Any] = {"_listeners": [], "_watchers": [], "_begin_watchers": []}
        return {**self.__dict__, **own, "_meet_before_close": None}

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

    def watch(self, listener: LoopListener) -> None:
        """Inform ``listener`` how the training loop gets its batches."""
        self._watchers.append(listener)

    def watch_begin(self, listener: BeginListener) -> None:
        """Inform ``listener`` when :meth:`epochs` yields an epoch, and when its batches are
        iterated.
        """
        self._begin_watchers.append(listener)

    @property
    def expects_request(self) -> bool:
        """Whether the loop is known to request the next batch in this thread, and has read none
        ahead.
        """
        return (
            self._requesting_thread == threading.get_ident()
            and self._iteration.requests == self._advances - self._iteration.counted_before
        )

    def _begin_requests(self, seen: bool) -> None:
        """Begin an iteration over batches. ``seen``: whether :meth:`_request_batch` will be called
        for each of them.
        """
        self._tell_skipped()
        start = (self.epoch, self._samples_done())
        self._iteration, self._stale = Iteration(self._advances, start), ""
        self._requesting_thread = threading.get_ident() if seen else None

    def _request_batch(self) -> None:
        """Note that the loop requests a batch. Raises RuntimeError if it is of another position."""
        if self._stale:
            raise RuntimeError(self._stale)
        self._iteration.requested(self._advances)
        self._requesting_thread = threading.get_ident()
        for listener in self._watchers:
            listener.batch_requested(self)

    def _refuse_prefetched(self, begun: tuple[int, int], restored: tuple[int, int]) -> None:
        """Make the next request of this iteration fail if its workers began to read at another
        position than the restored one, and let it pass again if both are equal.

        Args:
            begun: epoch and sample at which the iteration began.
            restored: epoch and sample of the state that was restored since.
        """
        self._stale = ""
        if begun != restored:
            self._stale = (
                f"A state (epoch {restored[0]}, sample {restored[1]}) was restored after "
                f"iter(loader), whose workers read from epoch {begun[0]}, sample {begun[1]}: their "
                "batches do not belong to the state. Call iter(loader) after restore()."
            )

    def _tell_skipped(self) -> bool:
        """Tell the user about batches that the script has skipped where the run resumed. Return
        whether they were told now.
        """
        sentence = self._resumed_epoch.after_skipping(self._iteration, self._advances)
        self._notice(sentence)
        return bool(sentence)

    def _tell_skipped_at_exit(self) -> None:
        if not self._tell_skipped() and not self.looping:
            self._notice(self._resumed_epoch.at_end(self._iteration, self._advances))

    def _notice(self, sentence: str) -> None:
        if sentence and self.rank == 0:
            notice(sentence)

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Note that the run has resumed from ``state`` of the subclass. Does nothing in live mode:
        there only joiners resume, the state must be equal on all ranks, and a skipped batch is an
        error anyway.
        """
        if env.LIVE in os.environ:
            return
        self._resumed_epoch.load(state, self.epoch, self._samples_done())
        if self._resumed_epoch.start is not None and not self._looks_at_exit:
            self._looks_at_exit = True
            atexit.register(_tell_skipped_at_exit, weakref.ref(self))

    def _leave_batches(self) -> None:
        """Note that the iterator of the batches is freed. If all batches that it yielded are
        trained on, the loop has left the epoch after a step.
        """
        expected, self._requesting_thread = self.expects_request, None
        requested = self._iteration.requests > 0
        if not expected or not requested or self.between_epochs or not self._watchers:
            return
        self.leave_early()
        for listener in self._watchers:
            listener.batches_left(self)

    def _count_batch(self) -> None:
        """Note that ``advance()`` counts a batch."""
        self._advances += 1
        self._iteration.counted()

    def leave_early(self) -> None:
        """Note that the loop has left the batches of an epoch after one of its steps. The code that
        follows the steps of the epoch runs. Does nothing in scripts without :meth:`epochs`.
        """
        if self.looping and not self.between_epochs:
            self.left_early = self.between_epochs = True

    def resume_epoch(self) -> None:
        """Note that an epoch that was left early goes on."""
        if self.left_early:
            self.left_early = self.between_epochs = False
            for listener in self._watchers:
                listener.batches_resumed(self)

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
        """Close the previous epoch, because the batches of its successor are requested. While
        :meth:`epochs` is in use this closes no epoch: a script may also iterate its training data
        after the steps, to evaluate.
        """
        self.resume_epoch()
        if not self.looping:
            self.close_epoch()
        self.begin_batches()

    def begin_batches(self) -> None:
        """Note that the code at the beginning of the epoch is over."""
        for begin_listener in self._begin_watchers:
            begin_listener.batches_begin(self)

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
            # If the loop was left early, the code that follows the training runs, and ends the
            # epoch; the position is that of the newest step.
            self.left_early = self.looping = False
            training_over()

    def _epochs(self, count: int) -> Iterator[int]:
        while self.epoch < count and not self._ended:
            epoch, advances, resumed = self.epoch, self._advances, self._is_begun()
            for begin_listener in self._begin_watchers:
                begin_listener.epoch_begins(self, resumed)
            yield epoch
            if self._ended:
                return
            if is_left := self.left_early:
                self._abandon_epoch()
                self.left_early, self.between_epochs = False, True
            if self.between_epochs and self._meet_before_close is not None:
                self._meet_before_close()
                if self.epoch == epoch:
                    continue
            if self.between_epochs:
                if not is_left:
                    self._report_length_change(epoch, self._complete_length())
                self.finished = self.epoch >= count
                self.close_epoch()
                continue
            if self.epoch != epoch:
                continue
            # A script may stop each epoch after N batches. If it resumes there, no step is left.
            if self._advances == advances and not resumed:
                raise RuntimeError(
                    f"Epoch {epoch} ended without a single call of {self._name}.advance(), so that "
                    "no snapshot knows how far it came. "
                    f"Call {self._name}.advance() at the end of each training step, on every rank."
                )
            self._abandon_epoch()
            for listener in self._watchers:
                listener.batch_requested(self)

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
        return self._samples_done() > 0

    def _abandon_epoch(self) -> None:
        """Tell the user that the loop has left the epoch early, and move to the next epoch."""
        if not self._tell_skipped():
            tell(self._left_sentence(), once="epoch left")
        self._report_length_change(self.epoch, self._samples_done())
        self._begin_next_epoch()

    def _report_length_change(self, epoch: int, length: int) -> None:
        """Tell the user if the length of an ended epoch, samples, differs from that of the epoch in
        which the run resumed.
        """
        size = self._constant_batch()
        if size is not None and env.LIVE not in os.environ:
            self._notice(self._resumed_epoch.after_epoch(epoch, length, size))

    def _complete_length(self) -> int:
        """Return the number of samples of the newest epoch that ended without one left."""
        raise NotImplementedError

    def _constant_batch(self) -> int | None:
        """Return the number of samples of each step over all ranks; None if it changes."""
        raise NotImplementedError

    def _samples_done(self) -> int:
        """Return the number of samples of the epoch that are done, over all ranks."""
        raise NotImplementedError

    def _left_sentence(self) -> str:
        """Return the message that the loop has left the epoch early."""
        raise NotImplementedError

    def _begin_next_epoch(self) -> None:
        """Move to the next epoch."""
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


def _tell_skipped_at_exit(reference: weakref.ref[CountedEpochs]) -> None:
    """Look at the last iteration of a script that ends without requesting another epoch."""
    epochs = reference()
    if epochs is not None:
        epochs._tell_skipped_at_exit()  # noqa: SLF001 (of this module)
