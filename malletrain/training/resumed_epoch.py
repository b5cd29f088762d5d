"""Detects samples that a script leaves out, or trains on too often, in an epoch within which a run
resumes: a loader begins at the first sample that was not trained on, and a script that was written
for another loader skips the same batches once more, or counts its batches from 0.

Decides about which epochs there is a message. A script may leave out batches in every epoch (a
limit, a ``break``, a last group of micro-batches that is dropped), so one of these facts is needed:

* The batches of the resumed epoch ran out, and those that were not counted were taken before its
  first step.
* A script with a loop of its own took all batches that were left of the resumed epoch without a
  step, and ended.
* The epoch was shorter or longer than two others, of the same length, in which the run did not
  resume, by as many batches as were done before the run resumed. This is known for scripts that
  loop over ``epochs()``.

Nothing is certain of batches that another thread requests than the one that counts them: how far it
reads ahead is unknown.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

_LENGTH, _NOTICE = "epoch_length", "skipping_notice"
_BEGIN = "the loader begins at the first sample that was not trained on"


class Iteration:
    """The batches of one iteration: how many the loop has requested, and how many of the first ones
    it has not counted.
    """

    def __init__(self, counted: int = 0, start: tuple[int, int] = (0, 0)) -> None:
        self.start = start
        """Epoch, and number of samples of it that were done."""
        self.counted_before = counted
        """Number of batches that the script had counted when it began."""
        self.requests = 0
        """Number of batches that the loop has requested."""
        self._threads: set[int] = set()
        """Threads that have requested or counted batches."""
        self._leading: int | None = None
        """Number of batches before the first step; None before the first step has ended."""
        self._size = -1
        """Number of batches that the sampler gave; -1 until they have run out."""

    def requested(self, counted: int) -> None:
        """Note a request. ``counted``: number of batches that the script has counted so far."""
        first_step = counted - self.counted_before
        if self._leading is None and first_step:
            self._leading = self.requests - first_step
        self.requests += 1
        self._threads.add(threading.get_ident())

    def counted(self) -> None:
        """Note that the script counts a batch."""
        self._threads.add(threading.get_ident())

    def ran_out(self, size: int) -> None:
        """Note that the newest request got no batch. ``size``: number of batches of the sampler,
        which a resumable loader may have skipped in part.
        """
        self._size = size

    def without_step(self, counted: int) -> int:
        """Return the number of batches of the iteration if this thread has taken all and none is
        counted; else 0. ``counted``: as for :meth:`requested`.
        """
        is_certain = self._threads == {threading.get_ident()}
        return max(0, self._size) if is_certain and counted == self.counted_before else 0

    def skipped(self, counted: int) -> int:
        """Return the number of batches that were skipped before the first step; 0 if this is not
        certain. ``counted``: as for :meth:`requested`.
        """
        if self._leading is None or self._size < 0 or len(self._threads) != 1:
            return 0
        skipped = self._leading + self._size - (self.requests - 1)
        uncounted = self._size - (counted - self.counted_before)
        return skipped if 0 < skipped <= uncounted else 0


class ResumedEpoch:
    """The epochs of one run, from the state in which it resumes.

    Args:
        name: name of the sampler in scripts, for messages.
        noun: noun for what an epoch has, for messages.
    """

    def __init__(self, name: str, noun: str) -> None:
        self._name, self._noun = name, noun
        self.start: tuple[int, int] | None = None
        """Epoch, and number of samples of it that were done, in the state in which this run
        resumed; None if it did not resume within an epoch.
        """
        self._usual: int | None = None
        """Length, samples, of the newest epoch in which the run did not resume; None if unknown."""
        self._length: int | None = None
        """Length of the epoch in which the run resumed, until it has been compared."""
        self._has_notice = False

    def state(self) -> dict[str, Any]:
        """Return the entries for the sampler's state."""
        length = {_LENGTH: self._usual} if self._usual is not None else {}
        return {**length, **({_NOTICE: True} if self._has_notice else {})}

    def load(self, state: Mapping[str, Any], epoch: int, done: int) -> None:
        """Continue from a sampler's state, with ``done`` samples of ``epoch``."""
        self.start = (epoch, done) if done else None
        self._usual, self._length = state.get(_LENGTH), None
        self._has_notice = bool(state.get(_NOTICE))

    def at_end(self, iteration: Iteration, counted: int) -> str:
        """Return the message about batches of the resumed epoch that a script with a loop of its
        own took without a step before it ends; empty if there is none. ``iteration``: the
        newest one.
        """
        batches = iteration.without_step(counted) if iteration.start == self.start else 0
        if self._has_notice or not batches or self.start is None:
            return ""
        self._has_notice = True
        return (
            f"The script took the last {batches} batches of epoch {self.start[0]}, in which "
            f"this run resumed at {self._noun} {self.start[1]}, without a step: {_BEGIN}. If it "
            f"skips batches after a restart, remove that: it counts an epoch without a step, so "
            "that the training ends too early. To look at the data, use a loader of its own."
        )

    def after_skipping(self, iteration: Iteration, counted: int) -> str:
        """Return the message about batches that were skipped in ``iteration``; empty if there
        is none.
        """
        batches = iteration.skipped(counted) if iteration.start == self.start else 0
        if self._has_notice or not batches or self.start is None:
            return ""
        self._has_notice = True
        return (
            f"Epoch {self.start[0]}, in which this run resumed at {self._noun} {self.start[1]}, "
            f"has left out {batches} {'batch' if batches == 1 else 'batches'}, which the script "
            f"skipped before its first step: {_BEGIN}. Remove what skips batches after a restart "
            "(`if i < done: continue`, the state of a resumable loader). If the script leaves "
            f"them out on purpose, call {self._name}.advance() for each."
        )

    def after_epoch(self, epoch: int, length: int, batch_size: int) -> str:
        """Note that ``epoch`` has ended after ``length`` samples. Return the message about an
        earlier one; empty if there is none. ``batch_size``: samples per step.
        """
        if self.start is not None and self.start[0] == epoch:
            self._length = length
            return ""
        usual, self._usual = self._usual, length
        if self._length is None or usual is None:
            return ""
        resumed, self._length = self._length, None
        if self._has_notice or usual != length or self.start is None:
            return ""
        ended, others, done = (math.ceil(n / batch_size) for n in (resumed, usual, self.start[1]))
        if abs(ended - others) != done:
            return ""
        self._has_notice = True
        return (
            f"Epoch {self.start[0]}, in which this run resumed at {self._noun} {self.start[1]}, "
            f"ended after {resumed} {self._noun}s, and two others after {length}. Does the script "
            f"skip or count batches itself? After a restart {_BEGIN}, and the counter of "
            f"enumerate() begins at 0. Compute what depends on it from {self._name}.epoch and the "
            f"{self._noun}s of it that are done."
        )
