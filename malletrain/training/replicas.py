"""Copies of the state of a node: to another node, and from the node's memory to the disk.

:class:`Replicas` decides when the state is copied to another node. If the script sets a number of
steps, a copy is made after each of these intervals. Otherwise copies are made with each snapshot if
a node holds more than it can hand over within its notice. :class:`HandOver` sends them while the
training continues, :mod:`malletrain.training.memory_snapshots` makes them.

:class:`DiskCopies` copies snapshots to the disk while the training continues, one snapshot at a
time. The process does not exit before its copy is complete.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from malletrain.protocol import env
from malletrain.protocol.sizes import shown
from malletrain.training import report
from malletrain.training.disk_tier import DiskTier
from malletrain.training.outcomes import Attempt, Outcomes
from malletrain.training.ranks import nodes, rank_and_world
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.step_times import counted_as

if TYPE_CHECKING:
    from malletrain.training.memory_snapshots import MemorySnapshots
    from malletrain.training.memory_tier import SnapshotTime


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


class HandOver:
    """Sends shards to another node while the training continues."""

    def __init__(self, memory: MemorySnapshots, moment: SnapshotTime) -> None:
        self.moment = moment
        """Time of their snapshot."""
        self._memory = memory
        self._failed = False
        # A daemon thread: a script that ends needs no copy.
        self._thread = threading.Thread(target=self._send, name="malletrain-replica", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            self._memory.hand_to_neighbour(self.moment)
        # the node is gone, or the snapshot is superseded: the previous copy stays valid
        except Exception:
            self._failed = True

    def arrived(self) -> bool | None:
        """Return whether the shards have arrived; None while they are being sent."""
        return None if self._thread.is_alive() else not self._failed


class Replicas:
    """The copies of one run on other nodes.

    Args:
        every: number of steps between copies that the script sets; 0 if it sets none.
        memory: snapshots in memory; None if snapshots go to disk only.
    """

    def __init__(self, every: int, memory: MemorySnapshots | None) -> None:
        self.every = every
        """Number of steps between copies; 0 for none, or copies with each snapshot."""
        self.exist = every > 0
        """True if another node has, or is about to have, a copy of a node's state."""
        self._memory = memory
        self._max_bytes = _bytes_in_time()
        self._sending: HandOver | None = None

    def after_step(self, steps: int) -> None:
        """Make a copy if the script wants one after step number ``steps``. Every rank calls it
        after the same step.
        """
        if self._memory is not None and self.every > 0 and steps % self.every == 0:
            self._memory.replicate(steps)

    def with_snapshot(self, steps: int) -> None:
        """Make a copy if a node holds more than it can hand over in time. Every rank calls it when
        a snapshot is due; for a sharded model after the same step (collective).

        Shards are sent while the training continues. The previous copy stays until all shards have
        arrived. If a copy is still being sent when the next one is due, no new copy is started.
        """
        memory = self._memory
        if memory is None or self.every or not self._max_bytes or nodes() < 2:
            return
        try:
            node_bytes = memory.bytes_per_node()
            self.exist = node_bytes > self._max_bytes and self._renew(memory, steps)
        except Exception as error:  # a state that cannot be copied must not stop the training
            self.exist = False
            report.tell(f"No copy on another node: {error}", once=f"no copy {type(error)}")
            return
        if self.exist and rank_and_world()[0] == 0:
            report.tell(
                f"A node holds {shown(node_bytes)} of the state and can hand over "
                f"{shown(self._max_bytes)} within its notice: another node has a copy, renewed "
                "with every snapshot.",
                once="copies by themselves",
            )

    def _renew(self, memory: MemorySnapshots, steps: int) -> bool:
        if memory.is_sharded:
            return self._renew_shards(memory, steps)
        # rank 0's node saves its own snapshot anyway
        return rank_and_world()[0] == 0 or memory.replicate(steps)

    @counted_as("snapshot")
    def _renew_shards(self, memory: MemorySnapshots, steps: int) -> bool:
        """Start a new copy if the previous one has arrived. Return whether a copy exists or is
        being sent.
        """
        previous = self._sending
        if previous is not None:
            arrived = memory.all_agree(previous.arrived)
            if arrived is None:
                return True
            if arrived:
                memory.settle(previous.moment)
        moment = memory.save(steps)
        self._sending = HandOver(memory, moment) if moment is not None else None
        return moment is not None


def _bytes_in_time() -> float:
    """Return the daemon's estimate of the bytes that a leaving node can hand over; 0 if there is
    none.
    """
    try:
        return max(0.0, float(os.environ.get(env.HAND_OVER, "0")))
    except ValueError:
        return 0.0
