"""Detects samples that a script leaves out, or trains on too often, in an epoch within which a run
resumes: a loader begins at the first sample that was not trained on, and a script that was written
for another loader skips the same batches once more, or counts its batches from 0.

Decides which epochs are told. A script may leave out batches in every epoch (a limit, a ``break``,
a last group of micro-batches that is dropped), so one of these facts is needed:

* The batches of the resumed epoch ran out, and those that were not counted were taken before its
  first step.
* A script with a loop of its own took all batches that were left of the resumed epoch without a
  step, and none of a later epoch.
* The epoch had another length than two others, of the same length, in which the run did not resume.
  This is known for scripts that loop over ``epochs()``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

COMPLETE = math.inf
"""Length of an epoch without a sample left."""
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

    def ran_out(self, size: int) -> None:
        """Note that the newest request got no batch. ``size``: number of batches of the sampler,
        which a resumable loader may have skipped in part.
        """
        self._size = size

    def without_step(self, counted: int) -> int:
        """Return the number of batches of the iteration if all were taken and none is counted; else
        0. ``counted``: as for :meth:`requested`.
        """
        return max(0, self._size) if counted == self.counted_before else 0

    def skipped(self, counted: int) -> int:
        """Return the number of batches that were skipped before the first step; 0 if this is not
        certain. ``counted``: as for :meth:`requested`.
        """
        if self._leading is None or self._size < 0:
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
        self._usual: float | None = None
        """Length of the newest epoch in which the run did not resume; None if there is none."""
        self._length: float | None = None
        """Length of the epoch in which the run resumed, until it has been compared."""
        self._passed = 0
        """Number of batches of the resumed epoch that were taken without a step, in a loop of the
        script's own, until it is known whether it does so in other epochs.
        """
        self._has_notice = False

    def state(self) -> dict[str, Any]:
        """Return the entries for the sampler's state."""
        length = {_LENGTH: self._usual} if self._usual not in (None, COMPLETE) else {}
        return {**length, **({_NOTICE: True} if self._has_notice else {})}

    def load(self, state: Mapping[str, Any], epoch: int, done: int) -> None:
        """Continue from a sampler's state, with ``done`` samples of ``epoch``."""
        self.start = (epoch, done) if done else None
        self._usual = state.get(_LENGTH, COMPLETE if epoch else None)
        self._length, self._passed, self._has_notice = None, 0, bool(state.get(_NOTICE))

    def after_loop(self, iteration: Iteration, counted: int, is_last: bool) -> str:
        """Note that an iteration of a loop of the script's own is over. Return the message about
        batches of the resumed epoch that were taken without a step; empty if nothing is to be told.
        ``is_last``: whether the script ends.
        """
        if self._has_notice or self.start is None:
            return ""
        if iteration.start == self.start and (passed := iteration.without_step(counted)):
            self._passed = passed
            is_certain = is_last
        else:
            is_other = iteration.start[0] > self.start[0] and not iteration.start[1]
            is_certain = is_other and counted > iteration.counted_before
            if is_other and not is_certain:
                self._passed = 0  # it does so in every epoch
        if not self._passed or not is_certain:
            return ""
        self._has_notice = True
        return (
            f"The script took the last {self._passed} batches of epoch {self.start[0]}, in which "
            f"this run resumed at {self._noun} {self.start[1]}, without a step: {_BEGIN}. If it "
            f"skips batches after a restart, remove that: it counts an epoch without a step, so "
            "that the training ends too early. To look at the data, use a loader of its own."
        )

    def after_skipping(self, iteration: Iteration, counted: int) -> str:
        """Return the message about batches that were skipped in ``iteration``; empty if nothing is
        to be told.
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

    def after_epoch(self, epoch: int, length: float) -> str:
        """Note that ``epoch`` has ended after ``length`` samples, :data:`COMPLETE` for all. Return
        the message about an earlier one; empty if nothing is to be told.
        """
        if self.start is not None and self.start[0] == epoch:
            self._length = length
            return ""
        usual, self._usual = self._usual, length
        if self._length is None or usual is None:
            return ""
        resumed, self._length = self._length, None
        if self._has_notice or usual != length or resumed == usual or self.start is None:
            return ""
        self._has_notice = True
        return (
            f"Epoch {self.start[0]}, in which this run resumed at {self._noun} {self.start[1]}, "
            f"ended after {self._shown(resumed)}, and two others after {self._shown(length)}. Does "
            f"the script skip or count batches itself? After a restart {_BEGIN}, and the counter "
            f"of enumerate() begins at 0. Compute what depends on it from {self._name}.epoch and "
            f"the {self._noun}s of it that are done."
        )

    def _shown(self, length: float) -> str:
        return f"all its {self._noun}s" if length == COMPLETE else f"{length:.0f} {self._noun}s"
