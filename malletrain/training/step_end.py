"""When the work that is due after a training step is done: snapshots, and answers to requests for
them.

The work is done when the loop requests its next batch, not when it reports the end of its step.
What the script does between the two then belongs to the step: a scheduler, a log line, or a
``break`` by which the loop leaves the epoch. A state from before that ``break`` would be wrong: a
run that resumed from it would make one more step.

:class:`StepEnd` decides when the work is done. It is done at once if the next request is not known
to come: in a loop that reads its batches ahead or in another thread, or that does not use a
DataLoader. After the last step of an epoch, and after a ``break`` within ``sampler.epochs()``, it
is done when the epoch is closed. It is not done if the loop over the epochs ends by ``break``: the
code that follows the training runs, and a run that resumed in it would train on.

A rank that is stopped for a planned change in the code after an epoch's steps would not run that
code to its end, because the snapshot of rank 0 is from after it. :class:`EpochEnds` counts the
ranks that have run it, in the group's store, and decides how long rank 0, which has saved, waits
for slower ranks before it lets the launcher stop all.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from malletrain.training import report
from malletrain.training.disk_tier import group_store
from malletrain.training.epochs import CountedEpochs
from malletrain.training.ranks import rank_and_world

_exiting = threading.Event()
"""Set when the script has ended. An iterator that is freed then has not been left."""
WAIT_S = 1.0
"""Maximum time that rank 0 waits, seconds. The state is saved then, but of a notice of 5 s a drain
may take 3 s.
"""
_LOOK_S = 0.01


class StepEnd:
    """The end of the current step.

    Args:
        work: what is done after each step.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._pending: tuple[CountedEpochs, int] | None = None
        """Epochs, and thread, whose next request of a batch the work waits for; None for none."""
        self._due_at_close = False
        self._watched: list[CountedEpochs] = []
        # Not when this module is imported: a fork server imports it before the script registers
        # its exit handlers, which would then run first.
        atexit.register(_exiting.set)

    def watch(self, epochs: CountedEpochs) -> None:
        """Learn how the loop over ``epochs`` gets its batches. Without that its work is not kept
        for the next request.
        """
        self._watched.append(epochs)
        epochs.watch(self)

    def step_done(self, epochs: CountedEpochs | None) -> None:
        """Do the work, or keep it for later. ``epochs``: the sampler or stream over which the
        script loops; None for none.
        """
        self._pending = None
        if epochs is not None and epochs.between_epochs:
            self._due_at_close = True
            report.between_epochs(True)
        elif epochs in self._watched and epochs is not None and epochs.expects_request:
            self._pending = (epochs, threading.get_ident())
        else:
            self._work()

    def batch_requested(self, epochs: CountedEpochs) -> None:
        """Do the work that waits for this request."""
        if self._pending == (epochs, threading.get_ident()):
            self._pending = None
            self._work()

    def batches_left(self, epochs: CountedEpochs) -> None:
        """Keep the work until the epoch is closed. Do it now in a loop that does not tell when an
        epoch ends.
        """
        if _exiting.is_set():
            return
        if not epochs.left_early:
            self.batch_requested(epochs)
        elif self._pending == (epochs, threading.get_ident()):
            self._pending, self._due_at_close = None, True
            report.between_epochs(True)

    def batches_resumed(self, epochs: CountedEpochs) -> None:
        """Keep the work until the next request of a batch: the epoch is not over."""
        if self._due_at_close:
            self._due_at_close, self._pending = False, (epochs, threading.get_ident())
            report.between_epochs(False)

    def epoch_closed(self) -> None:
        """Do the work that waits for the end of the epoch."""
        due, self._due_at_close = self._due_at_close, False
        if due:
            self._work()


class EpochEnds:
    """The ends of the epochs of one run, on one rank.

    Args:
        number: number of the run in the script, the same on all ranks.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._ends = 0
        self._just_closed = False
        self._is_lost = False
        """The store does not answer. Each further question would be a warning of torch's."""

    def closed(self) -> None:
        """Note that this rank has run the code after an epoch. Takes one message."""
        self._ends += 1
        self._just_closed = self._add(1) is not None

    def over(self) -> None:
        """Note that this rank goes on with the next epoch."""
        self._just_closed = False

    def wait_for_all(self) -> None:
        """Wait until all ranks have run the code after the epoch that this rank has just closed,
        for at most :data:`WAIT_S`. Does nothing within an epoch.
        """
        deadline = time.monotonic() + WAIT_S
        while self._just_closed and time.monotonic() < deadline:
            if (self._add(0) or rank_and_world()[1]) >= rank_and_world()[1]:
                return
            time.sleep(_LOOK_S)

    def _add(self, count: int) -> int | None:
        """Add ``count`` to the number of ranks that have closed this epoch. Return that number;
        None with one rank or without a store.
        """
        store = group_store() if rank_and_world()[1] > 1 and not self._is_lost else None
        if store is None:
            return None
        key = f"malletrain/epoch end/{report.generation()}/{self._number}/{self._ends}"
        try:
            return int(store.add(key, count))
        except Exception:  # the node of the store is lost: the next collective says so
            self._is_lost = True
            return None
