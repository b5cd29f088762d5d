"""From the node's memory to the disk, while the training goes on.

Decides that one snapshot is copied at a time, and that the process does not end before it is.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from malletrain.training.disk_tier import DiskTier
from malletrain.training.outcomes import Attempt, Outcomes
from malletrain.training.snapshot_file import SnapshotError


class DiskCopies:
    """Those of one run, made by its rank 0."""

    def __init__(self, disk: DiskTier, outcomes: Outcomes) -> None:
        self._disk = disk
        self._outcomes = outcomes
        self._thread: threading.Thread | None = None
        self._refused: SnapshotError | None = None

    @property
    def busy(self) -> bool:
        """Whether one is being copied."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until none is.

        Raises:
            SnapshotError: another run's snapshot is where this one's was to be.
        """
        if self._thread is not None:
            self._thread.join()
        self.raise_refused()

    def raise_refused(self) -> None:
        """As :meth:`wait`, without waiting."""
        if self._refused is not None:
            raise self._refused

    def begin(self, source: Path, totals: tuple[float, int], retry_s: float) -> None:
        """Copy the snapshot in the file ``source``, which may be removed meanwhile.

        Args:
            source: the file.
            totals: (samples, steps) reported when it was taken.
            retry_s: when the next one follows, as it is told if this one fails.

        Raises:
            OSError: it is not there any more.
        """
        file = open(source, "rb")  # noqa: SIM115 (closed by the thread)

        def copy() -> None:
            started = time.monotonic()
            try:
                with file:
                    size = self._disk.copy(file)
            except SnapshotError as error:
                self._refused = error
            except Exception as error:  # a full disk stops no training
                self._outcomes.bad(error, retry_s, Attempt(time.monotonic() - started, *totals))
            else:
                self._outcomes.good(size, Attempt(time.monotonic() - started, *totals))

        # Not a daemon: a script that has ended has its last snapshot on disk.
        self._thread = threading.Thread(target=copy, name="malletrain-snapshot")
        self._thread.start()
