"""Reports the outcome of each snapshot of a run to the user and the agent.

Decides the messages. Each cause of a failure is reported once until saving works again.
:mod:`malletrain.training.snapshot` decides whether and when to try again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from malletrain.protocol.worker_channel import SnapshotTaken
from malletrain.training import disk_tier, report
from malletrain.training.ranks import nodes
from malletrain.training.sharded_state import is_sharded
from malletrain.training.snapshot_file import SnapshotError

# Advice to the user, by the error number of the disk.
_ADVICE = {
    errno.ENOSPC: "Free space there, or give Snapshot another path.",
    errno.EDQUOT: "Your quota is used up: free space, or give Snapshot another path.",
    errno.EFBIG: "A limit on file sizes is in force (ulimit -f): raise it, or give Snapshot "
    "another path.",
    errno.EROFS: "Give Snapshot a path on a file system that can be written.",
    errno.EACCES: "Give Snapshot a path in a folder that you may write to.",
    errno.EPERM: "Give Snapshot a path in a folder that you may write to.",
    errno.ENOTDIR: "A part of the path is a file: give Snapshot a path inside a folder.",
    errno.EEXIST: "A part of the path is a file: give Snapshot a path inside a folder.",
}


@dataclass(frozen=True)
class Attempt:
    """One try to save."""

    seconds: float
    """Duration of the attempt, seconds."""
    samples: float
    """Number of samples reported when it began."""
    steps: int
    """Number of steps reported when it began."""


class Outcomes:
    """Reports the snapshots of a run.

    Args:
        path: their path on disk.
        objects: the script's objects, by name.
        replicated: returns whether other nodes have copies.
    """

    def __init__(
        self, path: str, objects: Mapping[str, Any], replicated: Callable[[], bool]
    ) -> None:
        self.path = path
        self._objects = objects
        self._replicated = replicated
        self.saved_at: float | None = None
        """Time of the newest good snapshot, seconds since the epoch; None if there is none."""
        self._causes: set[str] = set()

    def report_saved(self, size: int, attempt: Attempt) -> None:
        """Report a snapshot of ``size`` bytes on disk."""
        if self._causes:
            report.tell(f"Snapshots to {self.path} work again.")
            self._causes.clear()
        self.saved_at = time.time()
        self._send(attempt, True, size, "")

    def report_in_memory(self, size: int, attempt: Attempt) -> None:
        """Report a snapshot of ``size`` bytes in the memory of the nodes."""
        self._send(attempt, True, size, "", "memory")

    def report_failed(self, error: Exception, wait_s: float, attempt: Attempt) -> str:
        """Report that a snapshot could not be saved.

        Args:
            error: the error.
            wait_s: time until the next attempt, seconds.
            attempt: the attempt.

        Returns:
            The message to the user.
        """
        cause, problem = _explained(error)
        last = (
            f"The last good one, saved {disk_tier.local_time_text(self.saved_at)}, stays"
            if self.saved_at
            else "There is none yet"
        )
        sentence = (
            f"Snapshot to {self.path} failed: {problem} {last}; training goes on and the "
            f"next attempt is in {wait_s:.0f} s."
        )
        if cause not in self._causes:
            self._causes.add(cause)
            report.tell(sentence)
            self._send(attempt, False, 0, sentence)
        return sentence

    def _send(
        self, attempt: Attempt, saved: bool, size: int, sentence: str, path: str = ""
    ) -> None:
        report.send(
            SnapshotTaken,
            saved=saved,
            path=path or self.path,
            bytes=size,
            seconds=attempt.seconds,
            samples=attempt.samples,
            steps=attempt.steps,
            sentence=sentence,
            nodes=nodes() if is_sharded(self._objects) else 1,
            replicated=self._replicated(),
        )


def _explained(error: Exception) -> tuple[str, str]:
    """Return (key of the cause, sentence)."""
    if isinstance(error, OSError):
        advice = _ADVICE.get(error.errno or 0, "")
        return f"errno {error.errno}", f"{error.strerror or error}. {advice}".strip()
    sentence = (
        str(error) if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}."
    )
    return type(error).__name__ + str(error)[:80], sentence
