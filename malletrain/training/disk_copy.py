"""Copies snapshots from the node's memory to the disk while the training continues.

Copies one snapshot at a time. The process does not exit before its copy is complete.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from malletrain.training.disk_tier import DiskTier
from malletrain.training.outcomes import Attempt, Outcomes
from malletrain.training.snapshot_file import SnapshotError


class DiskCopies:
    """The copies of one run, on its rank 0."""

    def __init__(self, disk: DiskTier, outcomes: Outcomes) -> None:
        self._disk = disk
        self._outcomes = outcomes
        self._thread: threading.Thread | None = None
        self._refused: SnapshotError | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the copy in progress, if any.

        Raises:
            SnapshotError: another run's snapshot is at the path of this run's.
        """
        if self._thread is not None:
            self._thread.join()
        self.raise_refused()

    def raise_refused(self) -> None:
        """Raise the error of :meth:`wait` without waiting."""
        if self._refused is not None:
            raise self._refused

    def begin(self, source: Path, totals: tuple[float, int], retry_s: float) -> None:
        """Start to copy the snapshot in the file ``source``, which can be removed meanwhile.

        Args:
            source: the file.
            totals: (samples, steps) reported when the snapshot was taken.
            retry_s: time until the next copy, seconds, for the message if this copy fails.

        Raises:
            OSError: the file cannot be opened.
        """
        file = open(source, "rb")  # noqa: SIM115 (closed by the thread)

        def copy() -> None:
            started = time.monotonic()
            try:
                with file:
                    size = self._disk.copy(file)
            except SnapshotError as error:
                self._refused = error
            except Exception as error:  # a full disk must not stop the training
                self._outcomes.report_failed(
                    error, retry_s, Attempt(time.monotonic() - started, *totals)
                )
            else:
                self._outcomes.report_saved(size, Attempt(time.monotonic() - started, *totals))

        # Not a daemon thread: the script exits only when its last snapshot is on disk.
        self._thread = threading.Thread(target=copy, name="malletrain-snapshot")
        self._thread.start()
