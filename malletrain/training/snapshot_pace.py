"""Decides when the next snapshot is due.

The script sets the maximum time between two snapshots. If the daemon forecasts when a node will be
lost, the time is at most Young's interval, √(2 · cost · time to the loss), at which saving costs as
much time as repeated work (Young, *Communications of the ACM* 17, 1974). Standard library only.
"""

from __future__ import annotations

import math
import time

from malletrain.protocol.flags import FlagsReader

MIN_INTERVAL_S = 5.0
"""Minimum time between snapshots due to a forecast, seconds: a loss costs a restart anyway, and
more snapshots would load shared file systems.
"""


def snapshot_every(cost_s: float, loss_in_s: float, max_s: float) -> float:
    """Return the time from one snapshot to the next, seconds.

    Args:
        cost_s: time for which a snapshot stops the training, seconds.
        loss_in_s: mean time until a node of the job is lost, seconds; infinite if no loss is
            expected.
        max_s: maximum of the result, seconds.
    """
    if not loss_in_s < math.inf:
        return max_s
    return min(max_s, max(MIN_INTERVAL_S, math.sqrt(2.0 * max(cost_s, 0.0) * max(loss_in_s, 0.0))))


class Pace:
    """Timer for the next snapshot of one process.

    Args:
        every_s: maximum time between snapshots, set by the script, seconds.
        flags: the agent's flags, with the forecast of a loss; None without an agent.
    """

    def __init__(self, every_s: float, flags: FlagsReader | None) -> None:
        self._every_s = every_s
        self._flags = flags
        self._loss_in_ms = 0
        self._since = time.monotonic()
        self._due = self._since + every_s
        self.cost_s: float | None = None
        """Time for which the last snapshot stopped the training, seconds; None before the first."""

    def is_due(self) -> bool:
        """Return whether a snapshot is due now. Takes about 200 ns."""
        if self._flags is not None and self._flags.loss_expected_ms() != self._loss_in_ms:
            self._due = min(self._due, self._since + self._interval())
        return time.monotonic() >= self._due

    def begin(self, due_in_s: float, cost_s: object = None) -> None:
        """Start the timer after a restore.

        Args:
            due_in_s: maximum time until the next snapshot, seconds.
            cost_s: cost of the last snapshot, seconds, as recorded in the restored one; ignored if
                it is not a finite number.
        """
        if isinstance(cost_s, float) and math.isfinite(cost_s):
            self.cost_s = cost_s
        self._since = time.monotonic()
        self._due = self._since + max(0.0, min(due_in_s, self._interval()))

    def saved(self, cost_s: float | None = None) -> None:
        """Restart the timer after a snapshot that stopped the training for ``cost_s`` seconds (None
        if unknown).
        """
        self.cost_s = self.cost_s if cost_s is None else cost_s
        self._since = time.monotonic()
        self._due = self._since + self._interval()

    def failed(self, wait_s: float) -> None:
        """Set the next attempt after a failure in ``wait_s`` seconds."""
        self._due = time.monotonic() + wait_s

    def _interval(self) -> float:
        self._loss_in_ms = 0 if self._flags is None else self._flags.loss_expected_ms()
        if not self._loss_in_ms or self.cost_s is None:
            return self._every_s
        return snapshot_every(self.cost_s, self._loss_in_ms / 1e3, self._every_s)
