"""When the work that is due after a training step is done: snapshots, and answers to requests for
them. Standard library only.

The work is done when the loop requests its next batch, not when it reports the end of its step.
What the script does between the two then belongs to the step: a scheduler, a log line, or a
``break`` by which the loop leaves the epoch. A state from before that ``break`` would be wrong: a
run that resumed from it would make one more step.

Decides when the work is done. It is done at once if the next request is not known to come: in a
loop that reads its batches ahead or in another thread, or that does not use a DataLoader. After the
last step of an epoch, and after a ``break`` within ``sampler.epochs()``, it is done when the epoch
is closed. It is not done if the loop over the epochs ends by ``break``: the code that follows the
training runs, and a run that resumed in it would train on.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from malletrain.training import report
from malletrain.training.epochs import CountedEpochs

_exiting = threading.Event()
"""Set when the script has ended. An iterator that is freed then has not been left."""
atexit.register(_exiting.set)


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
