"""How often to save a job that may lose a node at any moment.

Decides when the next snapshot is due. What the script says is the longest time between two. Where
the daemon foretells how soon a node is lost, it is Young's interval, √(2 · cost · time to the
loss), at which as much is lost to saving as to work done again (Young, *Communications of the ACM*
17, 1974). Standard library only.
"""

from __future__ import annotations

import math
import time

from malletrain.protocol.flags import FlagsReader

LEAST_S = 5.0
"""A loss costs a restart anyway, and shared file systems want some rest."""


def snapshot_every(cost_s: float, loss_in_s: float, most_s: float) -> float:
    """Seconds from one snapshot to the next.

    Args:
        cost_s: time for which training stands still while one is taken.
        loss_in_s: mean time until a node of the job is lost; infinite: none is expected.
        most_s: it is never longer than that.
    """
    if not loss_in_s < math.inf:
        return most_s
    return min(most_s, max(LEAST_S, math.sqrt(2.0 * max(cost_s, 0.0) * max(loss_in_s, 0.0))))


class Pace:
    """When the next snapshot of one process is due.

    Args:
        every_s: what the script says, seconds.
        flags: where the agent says how soon a loss is expected; None: there is no agent.
    """

    def __init__(self, every_s: float, flags: FlagsReader | None) -> None:
        self._every_s = every_s
        self._flags = flags
        self._loss_in_ms = 0
        self._since = time.monotonic()
        self._due = self._since + every_s
        self.cost_s: float | None = None
        """What the last snapshot cost, seconds; None: none was taken yet."""

    def is_due(self) -> bool:
        """Whether a snapshot is due now. Costs some 200 ns."""
        if self._flags is not None and self._flags.loss_expected_ms() != self._loss_in_ms:
            self._due = min(self._due, self._since + self._interval())
        return time.monotonic() >= self._due

    def begins(self, due_in_s: float, cost_s: object = None) -> None:
        """The state was restored; the next snapshot is due in so many seconds at most. ``cost_s``:
        what the last one cost, as it says.
        """
        if isinstance(cost_s, float) and math.isfinite(cost_s):
            self.cost_s = cost_s
        self._since = time.monotonic()
        self._due = self._since + max(0.0, min(due_in_s, self._interval()))

    def saved(self, cost_s: float | None = None) -> None:
        """One was taken just now, or begun, and stopped the training for ``cost_s`` seconds (None:
        not known).
        """
        self.cost_s = self.cost_s if cost_s is None else cost_s
        self._since = time.monotonic()
        self._due = self._since + self._interval()

    def failed(self, wait_s: float) -> None:
        """One could not be taken: try again after so long."""
        self._due = time.monotonic() + wait_s

    def _interval(self) -> float:
        self._loss_in_ms = 0 if self._flags is None else self._flags.loss_expected_ms()
        if not self._loss_in_ms or self.cost_s is None:
            return self._every_s
        return snapshot_every(self.cost_s, self._loss_in_ms / 1e3, self._every_s)
